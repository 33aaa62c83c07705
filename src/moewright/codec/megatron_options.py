"""Megatron-LM's options for the fields of a Layout and a Workload, in one table for all callers.

The names are those of its parser at d98e8a64 (2026-08-22). A field that several options say
together, such as `zero`, or that Megatron-LM does not have, is not in the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.spec.layout import DispatcherKind, Overlap

LAYOUT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "--tensor-model-parallel-size",
        "sp": "--sequence-parallel",
        "cp": "--context-parallel-size",
        "cp_comm": "--cp-comm-type",
        "pp": "--pipeline-model-parallel-size",
        "vpp": "--num-virtual-stages-per-pipeline-rank",
        "vpp_group": "--microbatch-group-size-per-virtual-pipeline-stage",
        "stages": "--pipeline-model-parallel-layout",
        "ep": "--expert-model-parallel-size",
        "etp": "--expert-tensor-parallel-size",
        "mbs": "--micro-batch-size",
        "dispatcher": "--moe-token-dispatcher-type",
        "capacity": "--moe-expert-capacity-factor",
        "capacity_fill": "--moe-pad-expert-input-to-capacity",
        "rank_capacity": "--moe-expert-rank-capacity-factor",
        "recompute": "--recompute-modules",
        "offload": "--offload-modules",
        "offload_fraction": "--optimizer-offload-fraction",
        "offload_layers": "--activation-offload-fraction",
        "graphs": "--cuda-graph-modules",
    }
)

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
    {
        Overlap.GRAD: "--overlap-grad-reduce",
        Overlap.PARAM: "--overlap-param-gather",
        Overlap.TP: "--tp-comm-overlap",
        Overlap.EP: "--overlap-moe-expert-parallel-comm",
        Overlap.WGRAD: "--delay-wgrad-compute",
        Overlap.SHARED: "--moe-shared-expert-overlap",
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
