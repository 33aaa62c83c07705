"""Layouts as people say them: a sentence and short labels, one for each part of the layout text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.codec.layout_text import FIELD_OF_KEY, split_layout
from moewright.spec.choices import FieldKind
from moewright.spec.layout import DEGREES, Layout
from moewright.spec.units import mention, plural

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
_NOUNS = MappingProxyType({"layout": _STAGES, "zero": "ZeRO stage"})
# What is said of a layout that has not what another has.
_ABSENT = MappingProxyType(
    {
        "cp": "CP 1",
        "etp": "ETP 1",
        "layout": "even stages",
        "dispatcher": "all-to-all",
        "overlap": "nothing overlapped",
        "recompute": "nothing recomputed",
        "offload": "nothing in host memory",
        "graphs": "no CUDA graphs",
        "schedule": "the usual schedule",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutWords:
    """A layout in words: a sentence, and labels that together say all that its text says.

    `choices` are those of what is no degree, such as "DeepEP", and `brief_labels` all labels, both
    without what only the text says, such as the layers of stages.
    """

    sentence: str
    labels: tuple[str, ...]
    brief_labels: tuple[str, ...]
    choices: tuple[str, ...]


def describe_layout(layout: Layout) -> LayoutWords:
    """Say a layout in words.

    That is "2 pipeline stages x 4 chunks, experts over 8 devices, no tensor parallelism, 8 replicas
    of the model; DeepEP; overlapped: experts' exchange".
    """
    choices = list(_label_choices(layout).values())
    named = [_STAGES if label.startswith(_STAGES) else label for label in choices]
    degrees = ", ".join((*_describe_degrees(layout), _describe_micro_batch(layout)))
    labels = _label_degrees(layout).values()
    return LayoutWords(
        sentence="; ".join((degrees[0].upper() + degrees[1:], *named)),
        labels=(*labels, *choices),
        brief_labels=(*labels, *named),
        choices=tuple(named),
    )


def describe_changes(layout: Layout, base: Layout) -> tuple[str, ...]:
    """Return the labels that a layout has and another has not, and what it goes without.

    The data-parallel degree is none of them: on the same devices it follows from the others.
    """
    own = {**_label_degrees(layout), **_label_choices(layout)}
    others = {**_label_degrees(base), **_label_choices(base)}
    return tuple(_list_changes(own, others))


def summarize_changes(layout: Layout, base: Layout) -> str:
    """Say in one line what a layout has that another has not; its text says the rest.

    That is "TP 1, PP 2 x 8, MBS 2; adds offload, graphs; other overlap; no recompute".
    """
    degrees = _list_changes(_label_degrees(layout), _label_degrees(base))
    parts, base_parts = _label_choices(layout), _label_choices(base)
    added = [key for key in parts if key not in base_parts]
    other = [key for key in parts if key in base_parts and parts[key] != base_parts[key]]
    lacking = [key for key in base_parts if key not in parts]
    phrases = (
        ", ".join(degrees),
        mention("adds {}", _list_nouns(added)),
        mention("other {}", _list_nouns(other)),
        mention("no {}", _list_nouns(lacking)),
    )
    return "; ".join(filter(None, phrases))


def _list_changes(own: Mapping[str, str], others: Mapping[str, str]) -> Iterator[str]:
    """Yield the labels by key that are not the other's, and what is said of keys that lack."""
    for key, label in own.items():
        if key != "dp" and others.get(key) != label:
            yield label
    for key, label in others.items():
        if key not in own:
            yield _ABSENT.get(key, f"without {label}")


def _list_nouns(keys: Iterable[str]) -> str:
    return ", ".join(_NOUNS.get(key, key.replace("_", " ")) for key in keys)


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


def _label_degrees(layout: Layout) -> dict[str, str]:
    """Return a label for each degree that is told, by its key."""
    chunks = f" x {layout.vpp}" if layout.vpp > 1 else ""
    labels = {
        "tp": f"TP {layout.tp}",
        "cp": f"CP {layout.cp}",
        "pp": f"PP {layout.pp}{chunks}",
        "ep": f"EP {layout.ep}",
        "etp": f"ETP {layout.etp}",
        "dp": f"DP {layout.dp}",
        "mbs": f"MBS {layout.mbs}",
    }
    usual = {key for key in ("cp", "etp") if getattr(layout, key) == 1}
    return {key: label for key, label in labels.items() if key not in usual}


def _label_choices(layout: Layout) -> dict[str, str]:
    """Return a label for each part of a layout's text that is no degree, by its key."""
    parts = split_layout(layout)
    return {key: _label(key, value) for key, value in parts.items() if key not in DEGREES}


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
