"""MindSpeed's options whose meaning depends on others, as Megatron-LM's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason

_DENSE = "--first-k-dense-replace"
_SHARED = "--n-shared-experts"
_EXTENDED = "--moe-tp-extend-ep"
_CONTEXT = "--context-parallel-algo"
_EXPERT_RANKS = "--expert-model-parallel-size"
_CONTEXT_ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "ulysses_cp_algo": "a2a",
        "megatron_cp_algo": "p2p",
        "kvallgather_cp_algo": "all_gather",
    }
)
DEPENDENT_OPTIONS: Mapping[str, int] = MappingProxyType(
    {_DENSE: 1, _SHARED: 1, _EXTENDED: 0, _CONTEXT: 1}
)


def translate_options(
    dependent: Mapping[str, tuple[str, ...]], options: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the options of Megatron-LM that MindSpeed's stand for, and a note on each.

    Raises:
        BadInput: a value is none that is planned here.
    """
    translated: dict[str, tuple[str, ...]] = {}
    for name, values in dependent.items():
        text = next(iter(values), "")
        if name == _DENSE:
            translated |= _translate_dense_layers(text, options)
        elif name == _SHARED:
            size = _number(options, "--moe-ffn-hidden-size", dependent, "--moe-intermediate-size")
            total = str(int(text) * size) if text.isdigit() else "0"
            translated["--moe-shared-expert-intermediate-size"] = (total,)
        elif name == _EXTENDED:
            ranks = _number(options, _EXPERT_RANKS) * _number(
                options, "--tensor-model-parallel-size"
            )
            translated |= {
                _EXPERT_RANKS: (str(ranks),),
                "--expert-tensor-parallel-size": ("1",),
            }
        elif text not in _CONTEXT_ALGORITHMS:
            if _number(options, "--context-parallel-size") > 1:
                rule = f"is planned here as {', '.join(_CONTEXT_ALGORITHMS)}"
                raise BadInput(Reason(field=name, value=text[:60], rule=rule))
        else:
            translated["--cp-comm-type"] = (_CONTEXT_ALGORITHMS[text],)
    notes = tuple(
        f"{name} is MindSpeed's: read as {' '.join((option, *values))}"
        for name in dependent
        for option, values in translated.items()
        if name in _origin(option)
    )
    return translated, notes


def _origin(option: str) -> tuple[str, ...]:
    origins = {
        "--moe-layer-freq": (_DENSE,),
        "--moe-shared-expert-intermediate-size": (_SHARED,),
        "--cp-comm-type": (_CONTEXT,),
    }
    return origins.get(option, (_EXTENDED,))


def _translate_dense_layers(
    text: str, options: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the pattern of layers that has no experts in the first ones."""
    layers = _number(options, "--num-layers")
    if not text.isdigit() or not 0 < int(text) < layers:
        return {}
    dense = int(text)
    return {"--moe-layer-freq": (f"([0]*{dense}+[1]*{layers - dense})",)}


def _number(
    options: Mapping[str, tuple[str, ...]],
    name: str,
    others: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    other: str = "",
) -> int:
    text = next(iter(options.get(name, others.get(other, ()))), "1")
    return int(text) if text.isdigit() else 1
