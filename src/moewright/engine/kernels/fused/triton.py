"""The Triton implementation of the kernels. Importing this imports Triton."""

from __future__ import annotations

import torch

from moewright.engine.kernels.fused import (
    triton_loss,
    triton_norm,
    triton_router_losses,
    triton_rows,
)
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.kernels.fused.scans import build_fast_scans
from moewright.engine.kernels.fused.triton_router import RouteTokens
from moewright.spec.model import RouterSpec, ScoreFunction


class TritonKernels:
    """A KernelSet of Triton kernels, for CUDA devices and Triton's interpreter."""

    def __init__(self) -> None:
        self.scans = build_fast_scans()

    permute = staticmethod(triton_rows.permute)

    def unpermute(
        self, rows_RH: torch.Tensor, rows_Tk: torch.Tensor, is_complete: bool
    ) -> torch.Tensor:
        return triton_rows.unpermute(rows_RH, rows_Tk)

    swiglu = staticmethod(triton_rows.swiglu)
    swiglu_backward = staticmethod(triton_rows.swiglu_backward)
    rms_norm = staticmethod(triton_norm.rms_norm)
    rms_norm_backward = staticmethod(triton_norm.rms_norm_backward)
    rotate = staticmethod(triton_rows.rotate)
    cross_entropy = staticmethod(triton_loss.cross_entropy)
    sum_exp = staticmethod(triton_loss.sum_exp)
    cross_entropy_backward = staticmethod(triton_loss.cross_entropy_backward)
    router_losses = staticmethod(triton_router_losses.router_losses)

    def route_tokens(
        self,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None,
        forced_Tk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if spec.score is ScoreFunction.SPARSE_MIXER:
            return TorchKernels().route_tokens(logits_TE, spec, bias_E, forced_Tk)
        return RouteTokens.apply(logits_TE, spec, bias_E, forced_Tk)
