"""The seam between the model and whoever works on rows, router scores and gated activations.

Implementations give the same numbers up to rounding, and the model keeps the same tensors for backward with each, so
the ledger does not ask which one ran. But for `weigh`, nothing here is differentiated: the model's autograd functions
call one method forward and one backward.
Shapes: T tokens, k experts a token, E experts, R routed rows, H hidden, F expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moewright.spec.model import RouterSpec


class Kernels(Protocol):
    def spread(self, x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """Row i is x[tokens[i]]: [R,H]."""

    def sum_slots(self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, full: bool) -> torch.Tensor:
        """The sum of each token's own rows in their fixed order, in fp32: [T,H]; rows_Tk holds R where a slot has no
        row, which is nowhere so where `full`.
        """

    def swiglu(self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
        """silu(gate) * up * weight for x = (gate, up), in fp32: [R,F]; `weight` fp32, or None for ones."""

    def swiglu_backward(
        self, grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of x and, where there is one, of weight."""

    def weigh(
        self, logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None, forced_Tk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Experts [T,k] int64, by score plus bias or the `forced` ones, their weights [T,k] and all scores [T,E], the
        last two differentiable. Kept for backward are scores and experts, two numbers a weight and sum where weights
        are renormalised, and the logits of a score that needs them (rules.recompute).
        """
