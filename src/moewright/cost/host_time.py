"""Host time of a layer: the time of its launches, and how far they overlap with the device.

docs/formulas.md 11.
"""

from __future__ import annotations

from collections.abc import Sequence

from moewright.cost.constants import Constants
from moewright.cost.symbols import Symbols
from moewright.spec.layout import CudaGraphScope, Layout, Overlap
from moewright.spec.model import ModelSpec


def layer_host_s(
    constants: Constants,
    layout: Layout,
    graphs: Sequence[CudaGraphScope],
    model: ModelSpec,
    *,
    moe: bool,
) -> float:
    """Return the host time of one layer and micro-batch, forward and backward.

    It does not depend on the tokens.
    """
    c = constants
    if CudaGraphScope.FULL in graphs:
        return c["host_s_full_graph"]
    seconds = c["host_s_per_layer_microbatch"] * float(c["host_per_year"] ** c["stack_age_years"])
    if graphs:
        seconds *= 1 - _graphed_share(c, graphs)
    if Overlap.GRAD in layout.overlap or Overlap.PARAM in layout.overlap:
        seconds *= c["dp_overlap_host"]
    if layout.tp > 1:
        seconds *= c["tp_host"]
    if not moe or model.moe is None:
        return seconds * c["host_dense_layer_share"]
    seconds += c["host_s_per_local_expert"] * model.moe.experts / layout.ep
    if Overlap.EP in layout.overlap:
        seconds *= c["ep_overlap_host"]
    return seconds


def _graphed_share(constants: Constants, graphs: Sequence[CudaGraphScope]) -> float:
    """Return the share of a layer's host time that its graphs take over."""
    share = 0.0
    if CudaGraphScope.ATTN in graphs:
        share += constants["host_graphed_attention"]
    if CudaGraphScope.MOE_ROUTER in graphs:
        share += constants["host_graphed_router"]
    return share


def host_exponent(constants: Constants, sym: Symbols, *, synced: bool) -> float:
    """Return the exponent p of (device^p + host^p)^(1/p): the higher, the more the two overlap.

    It is lower where the host waits for every transfer (`synced`, as in 1F1B), and 1, so that times
    add, where a step has too few micro-batches for the host to run ahead.
    """
    if not sym.is_steady:
        return 1.0
    return constants["host_exponent_synced" if synced else "host_exponent"]
