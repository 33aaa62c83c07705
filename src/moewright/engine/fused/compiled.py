"""The seam in Triton. Importing this imports Triton."""

from __future__ import annotations

import torch

from moewright.engine.fused import plain, triton_loss, triton_norm, triton_rows
from moewright.engine.fused.triton_router import Weigh
from moewright.spec.model import RouterSpec


class Compiled:
    """See seam.Kernels."""

    def spread(self, x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return triton_rows.spread(x_TH, tokens_R)

    def sum_slots(self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, full: bool) -> torch.Tensor:
        return triton_rows.sum_slots(rows_RH, rows_Tk)

    def swiglu(self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool) -> torch.Tensor:
        return triton_rows.swiglu(x_R2F, weight_R, clamped)

    def swiglu_backward(
        self, grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return triton_rows.swiglu_backward(grad_RF, x_R2F, weight_R, clamped)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_norm.norm(x, weight, eps)

    def norm_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        mine: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_norm.norm_backward(grad, x, weight, eps, scale, mine)

    def rotate(self, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return triton_rows.rotate(x_BSHD, cos, sin)

    def losses(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        return triton_loss.losses(logits_TV, targets_T)

    def sums(self, logits_TV: torch.Tensor, top_T: torch.Tensor) -> torch.Tensor:
        return triton_loss.sums(logits_TV, top_T)

    def losses_backward(
        self,
        grad_T: torch.Tensor,
        logits_TV: torch.Tensor,
        columns_T: torch.Tensor,
        log_sum_T: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        return triton_loss.losses_backward(grad_T, logits_TV, columns_T, log_sum_T, size)

    def weigh(
        self, logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None, forced_Tk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where groups of experts shut others out, the choice is made as the reference makes it."""
        if forced_Tk is None and spec.top_groups < spec.groups:
            forced_Tk = plain.choose(plain.scores_of(logits_TE.detach(), spec.score), spec, bias_E)
        return Weigh.apply(logits_TE, spec, bias_E, forced_Tk)
