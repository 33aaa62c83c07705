"""The interface of the kernels between the model's products and attention.

Implementations give the same numbers up to rounding, and the model keeps the same tensors for
backward with each, so the ledger does not ask which one ran. But for those of the router, nothing
here is differentiated: the model's autograd functions call one method forward and one backward.

Shapes: T tokens, k experts a token, E experts, R routed rows, H hidden, F expert width, K any
width, V vocabulary, B batch, S sequence, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moewright.engine.kernels.fused.router_losses import RouterLossTerms
from moewright.engine.kernels.fused.scans import ScanKernels
from moewright.spec.model import RouterSpec


class KernelSet(Protocol):
    """The kernels that a job runs, by one implementation; `scans` are those of recurrent mixers."""

    @property
    def scans(self) -> ScanKernels: ...

    def permute(self, x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """Copy tokens to their rows: row i is x[tokens[i]], [R,H]."""

    def unpermute(
        self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, is_complete: bool
    ) -> torch.Tensor:
        """Sum each token's own rows in their fixed order, in fp32: [T,H].

        rows_Tk holds R for a slot without a row; where `is_complete` every slot has one.
        """

    def swiglu(
        self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
    ) -> torch.Tensor:
        """Return silu(gate) * up * weight for x = (gate, up), in fp32: [R,F].

        `weight` is fp32, or None for ones. `clamped` is gpt-oss's: g * sigmoid(1.702 g) * (u + 1) *
        weight, g = min(gate, 7) and u = up within -7..7.
        """

    def swiglu_backward(
        self,
        grad_RF: torch.Tensor,
        x_R2F: torch.Tensor,
        weight_R: torch.Tensor | None,
        clamped: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of x and, where there is one, of weight."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm x [...,K] and return it with its scale.

        The result is x times its scale 1 / sqrt(mean(x^2) + eps), rounded, times weight [K]; the
        scale is [...,1] fp32.
        """

    def rms_norm_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        weight_rows: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of weight, the latter from `weight_rows` of all rows [N,K].

        The scale is computed again where it is None.
        """

    def rotate(self, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x by position, in fp32.

        Its halves (first, second) become first * cos - second * sin and second * cos + first * sin;
        cos and sin are [S, D/2] or [B, S, D/2] fp32.
        """

    def cross_entropy(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood [T] fp32 of targets.

        It is anything finite where a target is negative.
        """

    def sum_exp(self, logits_TV: torch.Tensor, max_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over V of exp(logit - max): [T] fp32."""

    def cross_entropy_backward(
        self,
        grad_T: torch.Tensor,
        logits_TV: torch.Tensor,
        columns_T: torch.Tensor,
        log_sum_T: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        """Return (exp(logit - log_sum) - 1 at the target's column) * grad: [T,V].

        It is 0 from column `size` on. A column of -1 stands for a target outside these columns.
        Where log_sum [T] fp32 is None, it is computed over all V columns.
        """

    def route_tokens(
        self,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts by score plus bias, or take the forced ones, and weigh them.

        Returns experts [T,k] int64, their weights [T,k] and all scores [T,E], the last two
        differentiable. Kept for backward are scores and experts, two numbers a weight and sum where
        weights are renormalised, and the logits of a score that needs them (rules.saved.recompute).
        """

    def router_losses(
        self, logits_TE: torch.Tensor, scores_TE: torch.Tensor, terms: RouterLossTerms
    ) -> torch.Tensor:
        """Return this rank's parts of a router's four losses, fp32 [4], differentiable.

        Kept for backward are what rules.saved.recompute says: scores, shares, sums of scores where
        they are divided by them, and for the z loss logits with their log-sum-exp.
        """
