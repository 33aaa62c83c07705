"""Time of summing token rows by atomic additions, where a trainer has no kernel of its own for it.

torch.scatter_add adds element by element, each by an atomic, and so does the backward of a gather
of rows (docs/formulas.md 11). Its rate goes by multiprocessors, not by bandwidth.
"""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.constants import Constants
from moewright.cost.symbols import Symbols
from moewright.cost.time.layer_time import PricedOps
from moewright.cost.time.op_time import OpRow
from moewright.spec.hardware import Op
from moewright.spec.layout import DispatcherKind, Recompute
from moewright.spec.plan import TimePart
from moewright.spec.workload import Fusion


def add_atomic_sums(constants: Constants, sym: Symbols, priced: PricedOps) -> PricedOps:
    """Return the rows of a layer with experts with those of its sums over token rows.

    Forward adds the rows that experts return to their tokens, backward their gradients.
    """
    moe = sym.model.moe
    is_unfused = Fusion.PERMUTE in sym.workload.trainer.unfused
    # The library's own kernels permute what it moves.
    if moe is None or not is_unfused or sym.layout.dispatcher is DispatcherKind.HYBRIDEP:
        return priced
    seconds_per_element = constants["atomic_sum_s"]
    elements = sym.t * sym.model.expert_width * moe.router.top_k
    backward = OpRow(
        name="permute.atomic_sum",
        part=TimePart.ELEMENTWISE,
        op=Op.ELEMENTWISE,
        amount=sym.c * elements,
        x=sym.c * elements,
        dtype=sym.dtype,
    )
    forward = replace(
        backward,
        name="unpermute.atomic_sum",
        recomputed_by=(Recompute.FULL, Recompute.MOE),
    )
    seconds = seconds_per_element * elements
    return PricedOps(
        forward=(*priced.forward, (forward, seconds)),
        backward=(*priced.backward, (backward, seconds)),
    )
