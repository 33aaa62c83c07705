"""Layers that are no attention with an MLP: Megatron-LM's patterns of hybrid models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.intake.megatron.options import Arguments
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import MixerKind, RecurrentKind, RecurrentSpec

_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_MTP_PATTERN = "*E"  # of each depth: attention, then experts
_CHUNK_SIZE = 128  # of the scan, in MambaMixer
_MAX_LAYERS = 10_000
# What a symbol mixes tokens with, whether it has an MLP or experts, and whether experts.
_SYMBOLS: Mapping[str, tuple[MixerKind, bool, bool]] = MappingProxyType(
    {
        "M": (MixerKind.RECURRENT, False, False),
        "*": (MixerKind.ATTENTION, False, False),
        "-": (MixerKind.NONE, True, False),
        "E": (MixerKind.NONE, True, True),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridLayers:
    """The layers of a pattern as ModelSpec has them, and how many MTP depths follow."""

    mixers: tuple[MixerKind, ...]
    mlp_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    recurrent: RecurrentSpec | None
    mtp_layers: int


def read_hybrid(arguments: Arguments) -> HybridLayers | None:
    """Return the layers of a hybrid model; None for a model of layers with attention and an MLP.

    A pattern has a symbol a layer: M for Mamba-2, * for attention, - for an MLP and E for experts;
    what stands between slashes behind it are MTP depths.

    Raises:
        BadInput: a symbol, or a kind of MTP depth, is not planned here.
    """
    arguments.ignore("--is-hybrid-model", "--spec", "--mtp-use-repeated-layer")
    arguments.ignore(*_PATTERNS)
    name = next((name for name in _PATTERNS if arguments.has(name)), "")
    if not name:
        if arguments.has("--is-hybrid-model"):
            rule = "needs the pattern of its layers"
            raise BadInput(Reason(field="--is-hybrid-model", rule=rule, nearest=_PATTERNS[0]))
        return None
    text = arguments.text(name)
    pattern, *depths = text.split("/")
    unknown = sorted(set(pattern) - set(_SYMBOLS))
    if unknown or not pattern or len(pattern) > _MAX_LAYERS:
        rule = f"layers of the kinds {', '.join(_SYMBOLS)} are planned here"
        raise BadInput(Reason(field=name, value=text[:60], rule=rule))
    if any(depth != _MTP_PATTERN for depth in depths):
        rule = f"MTP depths other than {_MTP_PATTERN} cannot be planned here"
        raise BadInput(Reason(field=name, value=text[:60], rule=rule))
    depth_count = arguments.integer("--mtp-num-layers")
    kinds = [_SYMBOLS[symbol] for symbol in pattern]
    return HybridLayers(
        mixers=tuple(mixer for mixer, _, _ in kinds),
        mlp_layers=tuple(has_mlp for _, has_mlp, _ in kinds),
        moe_layers=tuple(is_moe for _, _, is_moe in kinds),
        recurrent=_read_mamba(arguments) if "M" in pattern else None,
        mtp_layers=len(depths) or depth_count,
    )


def _read_mamba(arguments: Arguments) -> RecurrentSpec:
    """Return the Mamba-2 mixer; without a number of heads it is twice as wide as the model."""
    head_dim = arguments.size("--mamba-head-dim", 64)
    heads = 2 * arguments.size("--hidden-size") // head_dim
    return RecurrentSpec(
        kind=RecurrentKind.MAMBA2,
        heads=arguments.size("--mamba-num-heads", heads),
        head_dim=head_dim,
        key_heads=arguments.size("--mamba-num-groups", 8),
        key_dim=arguments.size("--mamba-state-dim", 128),
        conv_bias=True,
        chunk_size=_CHUNK_SIZE,
    )
