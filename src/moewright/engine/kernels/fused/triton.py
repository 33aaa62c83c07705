"""The seam in Triton. Importing this imports Triton."""

from __future__ import annotations

import torch

from moewright.engine.kernels.fused import reference, triton_loss, triton_norm, triton_rows
from moewright.engine.kernels.fused.triton_router import Weigh
from moewright.spec.model import RouterSpec


class Compiled:
    """See seam.Kernels."""

    spread = staticmethod(triton_rows.spread)

    def sum_slots(self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, full: bool) -> torch.Tensor:
        return triton_rows.sum_slots(rows_RH, rows_Tk)

    swiglu = staticmethod(triton_rows.swiglu)
    swiglu_backward = staticmethod(triton_rows.swiglu_backward)
    norm = staticmethod(triton_norm.norm)
    norm_backward = staticmethod(triton_norm.norm_backward)
    rotate = staticmethod(triton_rows.rotate)
    losses = staticmethod(triton_loss.losses)
    sums = staticmethod(triton_loss.sums)
    losses_backward = staticmethod(triton_loss.losses_backward)

    def weigh(
        self,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where groups of experts shut others out, the choice is made as the reference makes it."""
        if forced_Tk is None and spec.top_groups < spec.groups:
            forced_Tk = reference.choose(
                reference.scores_of(logits_TE.detach(), spec.score), spec, bias_E
            )
        return Weigh.apply(logits_TE, spec, bias_E, forced_Tk)
