"""Megatron-LM's options for the fields of a Layout and a Workload, in one table for all callers.

The names are those of its parser at d98e8a64 (2026-08-22). A field that several options say
together, such as `zero`, or that Megatron-LM does not have, is not in the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.spec.layout import LAYOUT_FIELDS, DispatcherKind, Overlap

LAYOUT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {field.name: field.facts.megatron for field in LAYOUT_FIELDS if field.facts.megatron}
)

# Fields whose option says the value itself, and is left out at the default. They are numbers,
# switches that are off by default, and names that Megatron-LM spells as layout text does.
PLAIN_FIELDS = tuple(field for field in LAYOUT_FIELDS if field.facts.is_plain_option)

WORKLOAD_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "seq_len": "--seq-length",
        "global_batch": "--global-batch-size",
        "ramp_start": "--rampup-batch-size",
        "ramp_increment": "--rampup-batch-size",
    }
)

# The option that switches each overlap on. That of p2p is on by default; Megatron-LM has only an
# option to switch it off.
OVERLAP_OPTIONS: Mapping[Overlap, str] = MappingProxyType(
    {overlap: overlap.facts.megatron for overlap in Overlap if overlap.facts.megatron}
)

# Options that say, or exclude, what others say: a command that is given one of those leaves the
# key out.
_PIPELINE = (
    LAYOUT_OPTIONS["pp"],
    LAYOUT_OPTIONS["vpp"],
    LAYOUT_OPTIONS["stages"],
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", LAYOUT_OPTIONS["recompute"])
_GRAPHS = ("--cuda-graph-impl", LAYOUT_OPTIONS["graphs"])
SAME_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--num-layers-per-virtual-pipeline-stage": _PIPELINE,
        "--decoder-first-pipeline-num-layers": _PIPELINE,
        "--decoder-last-pipeline-num-layers": _PIPELINE,
        "--recompute-activations": _RECOMPUTE,
        "--moe-layer-recompute": _RECOMPUTE,
        "--recompute-method": _RECOMPUTE,
        "--recompute-num-layers": _RECOMPUTE,
        "--moe-enable-deepep": (LAYOUT_OPTIONS["dispatcher"],),
        "--external-cuda-graph": _GRAPHS,
        "--enable-cuda-graph": _GRAPHS,
        "--cuda-graph-scope": _GRAPHS,
        "--main-grads-dtype": ("--grad-reduce-in-bf16",),
        "--data-parallel-sharding-strategy": ("--use-megatron-fsdp",),
    }
)


_DISPATCHER_OPTIONS = (LAYOUT_OPTIONS["dispatcher"], "--moe-flex-dispatcher-backend")


def dispatcher_options(kind: DispatcherKind) -> tuple[tuple[str, str], ...]:
    """Return the options that choose a dispatcher, each with its word; () where none does."""
    return tuple(zip(_DISPATCHER_OPTIONS, kind.facts.megatron, strict=False))


def field_option(field: str) -> str:
    """Return the option that sets a field such as "layout.tp"; the field itself where none does."""
    record, _, name = field.partition(".")
    options = {"layout": LAYOUT_OPTIONS, "workload": WORKLOAD_OPTIONS}.get(record, {})
    return options.get(name, field)
