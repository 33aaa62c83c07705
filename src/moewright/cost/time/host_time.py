"""Host time of a layer: the time of its launches, and how far they overlap with the device.

docs/formulas.md 11.
"""

from __future__ import annotations

from collections.abc import Sequence

from moewright.cost.constants import Constants
from moewright.cost.stage_parts import LayerKind
from moewright.cost.symbols import Symbols
from moewright.spec.layout import CudaGraphScope, Layout, Overlap
from moewright.spec.model import MixerKind
from moewright.spec.workload import ExpertKernels

_WHOLE_LAYER = frozenset(
    (CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER, CudaGraphScope.MOE_PREPROCESS)
)


def layer_host_s(
    constants: Constants,
    layout: Layout,
    graphs: Sequence[CudaGraphScope],
    sym: Symbols,
    kind: LayerKind,
) -> float:
    """Return the host time of one layer and micro-batch, forward and backward.

    It does not depend on the tokens. A layer that has a mixer or an MLP alone takes about half of
    one that has both. What older software launches more is of layers with experts: their routing
    and permutation were fused, and their experts grouped, only later.
    """
    c = constants
    moe = sym.model.moe
    if CudaGraphScope.FULL in graphs or _captures_layer(graphs, sym, kind):
        return c["host_s_full_graph"]
    age = 1.0
    if kind.is_moe:
        age = float(c["host_per_year"] ** c["stack_age_years"])
    seconds = c["host_s_per_layer_microbatch"] * age
    seconds *= _launched_share(c, graphs, kind)
    if Overlap.GRAD in layout.overlap or Overlap.PARAM in layout.overlap:
        seconds *= c["dp_overlap_host"]
    if layout.tp > 1:
        seconds *= c["tp_host"]
    if not kind.is_moe or moe is None:
        return seconds
    expert_s = c["host_s_per_local_expert"]
    if sym.is_low_precision:
        expert_s += c["host_s_per_narrow_expert"] * age
    if sym.workload.trainer.expert_kernels is ExpertKernels.SEQUENTIAL:
        expert_s += c["host_s_per_expert_product"] * _expert_products(sym)
    # Not over etp: a rank launches a part of each of its experts.
    seconds += expert_s * moe.experts / layout.ep
    if layout.capacity:
        seconds += c["host_s_per_drop"]
    if Overlap.EP in layout.overlap:
        seconds *= c["ep_overlap_host"]
    return seconds


def _captures_layer(graphs: Sequence[CudaGraphScope], sym: Symbols, kind: LayerKind) -> bool:
    """Return whether graphs take a layer whole: with experts only where all sizes are fixed."""
    if kind.mixer is not MixerKind.ATTENTION or not _WHOLE_LAYER.issubset(graphs):
        return False
    return not kind.is_moe or sym.layout.has_fixed_rows


def _expert_products(sym: Symbols) -> int:
    """Return the products of an expert's forward, those of its adapters among them."""
    products = sym.model.ffn_matrices
    # An adapter adds two products to each.
    return products * (3 if sym.is_frozen and sym.workload.fine_tuning.lora_experts else 1)


def _launched_share(
    constants: Constants, graphs: Sequence[CudaGraphScope], kind: LayerKind
) -> float:
    """Return the launches that the host makes of a layer, those of a layer with experts being 1.

    A mixer takes half of what a layer with a dense MLP takes, an MLP the other half. Graphs take
    over the launches of a mixer, or of the router.
    """
    dense = constants["host_dense_layer_share"]
    has_mixer = kind.mixer is not MixerKind.NONE
    captured = CudaGraphScope.ATTN in graphs
    if kind.mixer is MixerKind.RECURRENT and not kind.has_mlp:
        captured = CudaGraphScope.MAMBA in graphs
    graphed = 0.0
    if captured and has_mixer:
        graphed = constants["host_graphed_attention"]
    if CudaGraphScope.MOE_ROUTER in graphs and (kind.is_moe or (has_mixer and kind.has_mlp)):
        graphed += constants["host_graphed_router"]
    if has_mixer and kind.has_mlp:
        return (1 - graphed) * (1.0 if kind.is_moe else dense)
    launches = dense / 2
    if kind.is_moe:
        # Experts without a mixer: a layer with both, less the mixer's half of a dense layer.
        launches = 1 - dense / 2
    # Both are fitted, and may differ in either direction.
    return max(0.0, launches - graphed)


def host_exponent(constants: Constants, sym: Symbols, *, synced: bool, is_moe: bool) -> float:
    """Return the exponent p of (device^p + host^p)^(1/p): the higher, the more the two overlap.

    It is lower where the host waits for every transfer (`synced`, as in 1F1B), higher where nothing
    of the layer makes it wait: in one with experts it waits for the rows of each expert, unless
    their number is fixed. It is 1, so that times add, where a step has too few micro-batches for
    the host to run ahead.
    """
    waiting, unblocked = host_exponents(constants, is_steady=sym.is_steady, synced=synced)
    waits_for_sizes = is_moe and not sym.layout.has_fixed_rows
    return waiting if waits_for_sizes else unblocked


def host_exponents(constants: Constants, *, is_steady: bool, synced: bool) -> tuple[float, float]:
    """Return the exponents of layers that wait for split sizes, and of those that do not."""
    if not is_steady:
        return 1.0, 1.0
    if synced:
        return constants["host_exponent_synced"], constants["host_exponent_synced"]
    return constants["host_exponent"], constants["host_exponent_unblocked"]
