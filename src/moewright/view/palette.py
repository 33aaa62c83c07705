"""The colours of pages: a component, a part of the step or a module has one on every page."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# In the order in which stacks show them. Middle tones: they stand on white and on near-black.
MEMORY_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#4878b8",
        "gradients": "#4fa3c7",
        "master": "#8467c9",
        "moments": "#b562b8",
        "activations": "#e07b39",
        "logits": "#c39a2b",
        "buffers": "#a0744c",
        "transient": "#cf5050",
        "communication": "#2f9e83",
        "fragmentation": "#8d96a3",
        "host": "#66738a",
    }
)
TIME_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "#4878b8",
        "dense": "#4fa3c7",
        "experts": "#2f9e83",
        "elementwise": "#7fa843",
        "head": "#c39a2b",
        "recompute": "#a0744c",
        "offload": "#7d7f4a",
        "ep_comm": "#e07b39",
        "tp_comm": "#d9558a",
        "cp_comm": "#b562b8",
        "pp_comm": "#cf5050",
        "dp_comm": "#8467c9",
        "bubble": "#8d96a3",
        "host": "#66738a",
        "optimizer": "#4d6296",
    }
)
MODULE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "#7d7f4a",
        "attention": "#4878b8",
        "dense_mlp": "#4fa3c7",
        "router": "#d9558a",
        "experts": "#2f9e83",
        "shared_experts": "#7fa843",
        "norm": "#b562b8",
        "head": "#c39a2b",
        "mtp": "#cf5050",
        "other": "#8d96a3",
    }
)
PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "data": "#7d7f4a",
        "forward": "#4878b8",
        "backward": "#2f9e83",
        "grad_reduce": "#8467c9",
        "optimizer": "#4d6296",
        "param_gather": "#b562b8",
        "other": "#8d96a3",
    }
)
# Rows of a timetable: forward, backward, weight gradients.
ROW_COLOURS: Mapping[str, str] = MappingProxyType({"F": "#4878b8", "B": "#2f9e83", "W": "#c39a2b"})


def build_palette() -> dict[str, dict[str, str]]:
    """Return every colour by kind and name, as pages take them."""
    return {
        "memory": dict(MEMORY_COLOURS),
        "time": dict(TIME_COLOURS),
        "module": dict(MODULE_COLOURS),
        "phase": dict(PHASE_COLOURS),
        "row": dict(ROW_COLOURS),
    }
