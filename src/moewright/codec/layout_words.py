"""Layouts as people say them: a sentence and short labels, one for each part of the layout text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from moewright.codec.layout_text import FIELD_OF_KEY, split_layout
from moewright.spec.choices import FieldKind
from moewright.spec.layout import DEGREES, Layout
from moewright.spec.units import plural

_MEMBERS = MappingProxyType(
    {
        "dispatcher": {
            "alltoall": "all-to-all",
            "allgather": "all-gather of tokens",
            "dedup": "de-duplicated all-to-all",
            "deepep": "DeepEP",
            "hybridep": "HybridEP",
            "ncclep": "NCCL EP",
        },
        "overlap": {
            "ep": "experts' exchange",
            "grad": "gradient sums",
            "param": "weight gathers",
            "p2p": "pipeline messages",
            "shared": "shared experts",
            "tp": "tensor-parallel exchange",
            "wgrad": "weight gradients",
        },
        "recompute": {
            "full": "whole layers",
            "layernorm": "norms",
            "moe_act": "expert activations",
            "moe": "expert layers",
            "mlp": "MLPs",
            "core_attn": "core attention",
            "mla_up_proj": "MLA up-projections",
        },
        "offload": {
            "optimizer": "the optimizer",
            "moe_act": "expert activations",
            "core_attn": "core attention",
            "expert_fc1": "inputs of experts",
        },
        "graphs": {"full": "whole steps", "attn": "attention", "moe_router": "router"},
        "schedule": {"1f1b": "1F1B", "zbv": "ZBV", "zb-h1": "ZB-H1", "dualpipev": "DualPipeV"},
    }
)
_LABELS = MappingProxyType(
    {
        "dispatcher": "",
        "overlap": "overlapped: ",
        "recompute": "recomputed: ",
        "offload": "in host memory: ",
        "graphs": "CUDA graphs: ",
        "schedule": "schedule ",
    }
)

_STAGES = "uneven stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutWords:
    """A layout in words: a sentence, and labels that together say all that its text says.

    `choices` are those of what is no degree, such as "DeepEP".
    """

    sentence: str
    labels: tuple[str, ...]
    choices: tuple[str, ...]


def describe_layout(layout: Layout) -> LayoutWords:
    """Say a layout in words.

    That is "2 pipeline stages x 4 chunks, experts over 8 devices, no tensor parallelism, 8 replicas
    of the model; DeepEP; overlapped: experts' exchange".
    """
    parts = split_layout(layout)
    choices = [_label(key, value) for key, value in parts.items() if key not in DEGREES]
    named = [_STAGES if label.startswith(_STAGES) else label for label in choices]
    degrees = ", ".join((*_describe_degrees(layout), _describe_micro_batch(layout)))
    return LayoutWords(
        sentence="; ".join((degrees[0].upper() + degrees[1:], *named)),
        labels=(*_label_degrees(layout), *choices),
        choices=tuple(named),
    )


def _describe_micro_batch(layout: Layout) -> str:
    """Return how many sequences a micro-batch has."""
    return f"{plural(layout.mbs, 'sequence')} a micro-batch"


def _describe_degrees(layout: Layout) -> Iterator[str]:
    """Yield how ranks divide the model and the batch, pipeline and experts first."""
    if layout.pp > 1:
        chunks = ""
        if layout.vpp > 1:
            chunks = f" x {layout.vpp} chunks"
        yield f"{layout.pp} pipeline stages{chunks}"
    else:
        yield "no pipeline"
    if layout.ep > 1:
        cut = ""
        if layout.etp > 1:
            cut = f", each cut in {layout.etp}"
        yield f"experts over {layout.ep} devices{cut}"
    elif layout.etp > 1:
        yield f"experts cut in {layout.etp}"
    if layout.tp > 1:
        yield f"tensors over {layout.tp}"
    else:
        yield "no tensor parallelism"
    if layout.cp > 1:
        yield f"sequences over {layout.cp}"
    if layout.dp > 1:
        yield f"{layout.dp} data-parallel ranks"


def _label_degrees(layout: Layout) -> Iterator[str]:
    yield f"TP {layout.tp}"
    if layout.cp > 1:
        yield f"CP {layout.cp}"
    yield f"PP {layout.pp}" + (f" x {layout.vpp}" if layout.vpp > 1 else "")
    yield f"EP {layout.ep}"
    if layout.etp > 1:
        yield f"ETP {layout.etp}"
    yield f"DP {layout.dp}"
    yield f"MBS {layout.mbs}"


def _label(key: str, value: str) -> str:
    """Return what is said of one choice; a member without words of its own is spelled out."""
    if key == "layout":
        return f"{_STAGES} {value.strip(chr(39))}"
    field = FIELD_OF_KEY.get(key)
    if field is None or field.kind not in (FieldKind.NAME, FieldKind.SET):
        label = "ZeRO" if key == "zero" else key.replace("_", " ")
        return f"{label} {value}"
    words = _MEMBERS.get(key, {})
    members = (words.get(member, member.replace("_", " ")) for member in value.split("+"))
    label = _LABELS.get(key, f"{key.replace('_', ' ')}: ")
    return f"{label}{', '.join(members)}"
