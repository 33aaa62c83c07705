"""Experts of DeepSpeed's own layer, as Megatron-DeepSpeed's options say them.

They are given back as options of Megatron-LM. What is left out is at Megatron-DeepSpeed's defaults:
every second layer has experts, one expert takes a token, and each fills its capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.intake.megatron.options import ask_value
from moewright.intake.megatron.unknown import find_unknown
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import whole_number

_RANKS = "--moe-expert-parallel-size"
_INTERVAL = "--expert-interval"
_KIND = "--mlp-type"
_TOPK = "--topk"
_CAPACITY = "--moe-train-capacity-factor"
_KEEP_ALL = "--disable-moe-token-dropping"
_CUT = "--enable-expert-tensor-parallelism"
# The number of values behind each; the last two change the bytes of no step.
EXPERT_OPTIONS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys((_RANKS, _INTERVAL, _KIND, _TOPK, _CAPACITY), 1),
        **dict.fromkeys((_KEEP_ALL, _CUT), 0),
        "--moe-min-capacity": 1,
        "--create-moe-param-group": 0,
    }
)
_MEGATRON_NAMES: Mapping[str, str] = MappingProxyType(
    {
        _RANKS: "--expert-model-parallel-size",
        _INTERVAL: "--moe-layer-freq",
        _TOPK: "--moe-router-topk",
        _CAPACITY: "--moe-expert-capacity-factor",
    }
)
_COUNT = "--num-experts"
# Where one of these is said, the layer is Megatron-core's.
_OF_CORE = ("--moe-router-topk", "--expert-model-parallel-size", "--moe-token-dispatcher-type")
_STANDARD = "standard"


def translate_experts(
    foreign: Mapping[str, tuple[str, ...]], options: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the options of Megatron-LM for DeepSpeed's experts, and a note on them.

    A model without experts has none, whatever is said of them.

    Raises:
        BadInput: a value is not known, or the layer is one that is not planned here.
    """
    if _COUNT not in options or any(name in options for name in _OF_CORE):
        return {}, ()
    kind = _tell(foreign, _KIND, _STANDARD)
    if kind != _STANDARD:
        rule = "adds a dense MLP beside the experts, which cannot be planned here"
        raise BadInput(Reason(field=_KIND, value=kind[:60], rule=rule, nearest=_STANDARD))
    interval = whole_number(_tell(foreign, _INTERVAL, "2"), otherwise=1)
    layers = whole_number("".join(options.get("--num-layers", ())), otherwise=interval)
    translated: dict[str, tuple[str, ...]] = {
        "--expert-model-parallel-size": (_tell(foreign, _RANKS, "1"),),
        "--moe-router-topk": (_tell(foreign, _TOPK, "1"),),
        "--moe-token-dispatcher-type": ("alltoall",),
        "--moe-layer-freq": (_spell_pattern(interval, layers),),
    }
    tp = "".join(options.get("--tensor-model-parallel-size", ())) or "1"
    if tp != "1" and "--sequence-parallel" not in options:
        rule = "has DeepSpeed's experts whole on each of its ranks, which cannot be planned here"
        raise BadInput(Reason(field="--tensor-model-parallel-size", value=tp[:20], rule=rule))
    if _CUT not in foreign:
        translated["--expert-tensor-parallel-size"] = ("1",)
    if _KEEP_ALL not in foreign:
        translated |= {
            "--moe-expert-capacity-factor": (_tell(foreign, _CAPACITY, "1.0"),),
            "--moe-pad-expert-input-to-capacity": (),
        }
    words = " ".join(" ".join((name, *values)) for name, values in translated.items())
    return translated, (f"{_COUNT} is of DeepSpeed's own layer: read as {words}",)


def refuse_without_deepspeed(foreign: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse options of DeepSpeed's experts in a command that runs without it.

    Raises:
        BadInput: it has some, and they ask for ranks, or only running the script tells how many.
    """
    for name in foreign:
        value = _tell(foreign, name, "")
        if (name, value) == (_RANKS, "1"):
            continue
        own = _MEGATRON_NAMES.get(name)
        rule = "is Megatron-DeepSpeed's, "
        rule += f"in Megatron-LM it is {own}" if own else "which this command does not run"
        raise BadInput(Reason(field=name, value=value[:60], rule=rule))


def _tell(foreign: Mapping[str, tuple[str, ...]], name: str, default: str) -> str:
    """Return the value of an option that may be left out.

    Raises:
        BadInput: only running the script tells it.
    """
    text = " ".join(foreign.get(name, (default,)))
    unknown = find_unknown(text)
    if unknown is not None:
        raise BadInput(ask_value(name, unknown))
    return text


def _spell_pattern(interval: int, layers: int) -> str:
    """Return which layers have experts, the last of each interval, as --moe-layer-freq says it."""
    ones = "([" + ",".join(["0"] * (interval - 1) + ["1"]) + f"]*{layers // interval})"
    rest = layers % interval
    return f"({ones}+[0]*{rest})" if rest else ones
