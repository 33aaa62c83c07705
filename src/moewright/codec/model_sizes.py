"""The sizes that the record of a model may have, in whatever file it stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.families.fields import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
)
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeFault:
    """A field of a model, by its path, whose value is beyond what it may be."""

    path: str
    value: int
    rule: str
    nearest: str


def find_size_faults(model: ModelSpec) -> Iterator[SizeFault]:
    """Yield the sizes that no model has, and lists that are not as long as it has layers."""
    for path, value, low, high in _list_sizes(model):
        if not low <= value <= high:
            nearest = str(min(max(value, low), high))
            yield SizeFault(
                path=path, value=value, rule=f"must be in {low}..{high}", nearest=nearest
            )
    for path in ("moe_layers", "mixers", "mlp_layers", "rope_layers"):
        length = len(getattr(model, path))
        if length != model.layers and (length or path == "moe_layers"):
            rule = f"must have a value for each of the {model.layers} layers"
            yield SizeFault(path=path, value=length, rule=rule, nearest=f"{model.layers} values")


def _list_sizes(model: ModelSpec) -> Iterator[tuple[str, int, int, int]]:
    attention = model.attention
    yield "layers", model.layers, 1, MAX_LAYERS
    yield "mtp_layers", model.mtp_layers, 0, MAX_LAYERS
    yield "hidden_size", model.hidden_size, 1, MAX_HIDDEN
    yield "vocab_size", model.vocab_size, 1, MAX_VOCAB
    yield "dense_ffn_size", model.dense_ffn_size, 0, MAX_FFN
    yield "max_position", model.max_position, 0, MAX_POSITION
    yield "attention.heads", attention.heads, 0, MAX_HEADS
    yield "attention.kv_heads", attention.kv_heads, 0, MAX_HEADS
    yield "attention.head_dim", attention.head_dim, 0, MAX_HEAD_DIM
    yield "attention.v_head_dim", attention.v_head_dim, 0, MAX_HEAD_DIM
    if model.moe is not None:
        yield "moe.experts", model.moe.experts, 1, MAX_EXPERTS
        yield "moe.ffn_size", model.moe.ffn_size, 1, MAX_FFN
        yield "moe.shared_ffn_size", model.moe.shared_ffn_size, 0, MAX_FFN
        yield "moe.router.top_k", model.moe.router.top_k, 1, model.moe.experts
