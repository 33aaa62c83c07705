"""Time of summing rows by torch's own operations, where a trainer has no kernel of its own for it.

Token rows: torch.scatter_add adds element by element, each by an atomic, and so does the backward
of a gather of rows (docs/formulas.md 11). Its rate goes by multiprocessors, not by bandwidth.

Biases of experts: a stack without a grouped product that adds them gathers a bias for each row, so
that the gradients of an expert's rows fall onto one row of few addresses, one after the other. That
takes as long as its fullest expert has rows, however wide they are.
"""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.constants import Constants
from moewright.cost.symbols import Symbols
from moewright.cost.time.layer_time import PricedOps
from moewright.cost.time.op_time import OpRow
from moewright.rules.adapters import trains_module
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.plan import TimePart
from moewright.spec.workload import Fusion

_BIASES = 2  # of the products of an expert: of gate and up together, and of down


def add_token_sums(constants: Constants, sym: Symbols, priced: PricedOps) -> PricedOps:
    """Return the rows of a layer with experts with those of sums over token rows.

    Forward adds the rows that experts return to their tokens, backward their gradients.
    """
    moe = sym.model.moe
    is_unfused = Fusion.PERMUTE in sym.workload.trainer.unfused
    if moe is None or not is_unfused or sym.layout.dispatcher.facts.permutes_rows:
        return priced
    elements = sym.t * sym.model.expert_width * moe.router.top_k
    seconds = constants["atomic_sum_s"] * elements
    backward = _sum_row("permute.atomic_sum", sym, elements)
    choices = (Recompute.FULL, Recompute.MOE)
    forward = replace(backward, name="unpermute.atomic_sum", recomputed_by=choices)
    return PricedOps(
        forward=(*priced.forward, (forward, seconds)),
        backward=(*priced.backward, (backward, seconds)),
    )


def add_bias_sums(constants: Constants, sym: Symbols, priced: PricedOps) -> PricedOps:
    """Return the rows with the sums of the gradients of experts' biases, last in backward."""
    moe = sym.model.moe
    is_unfused = Fusion.EXPERT_BIAS in sym.workload.trainer.unfused
    if moe is None or not moe.expert_bias or not is_unfused:
        return priced
    if not trains_module(sym.workload.fine_tuning, Module.EXPERTS):
        return priced
    widths = sym.model.fc1_matrices * moe.ffn_size + sym.model.expert_width
    rows_per_expert = sym.R * sym.layout.ep / moe.experts
    seconds = _BIASES * rows_per_expert * constants["expert_bias_row_s"]
    row = _sum_row("experts.bias_sum", sym, sym.R * widths)
    return PricedOps(forward=priced.forward, backward=(*priced.backward, (row, seconds)))


def _sum_row(name: str, sym: Symbols, elements: float) -> OpRow:
    return OpRow(
        name=name,
        part=TimePart.ELEMENTWISE,
        op=Op.ELEMENTWISE,
        amount=sym.c * elements,
        x=sym.c * elements,
        dtype=sym.dtype,
    )
