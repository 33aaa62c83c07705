"""The kernels of recurrent mixers: torch's on any device, fla-org's where they are installed.

What is kept for backward is the same with either: fla's kernels run again from their inputs, by
their public functions alone, so that no release of theirs changes what a layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.delta_rule import (
    CAUSAL_CONV,
    CAUSAL_CONV_BACKWARD,
    DELTA_RULE,
    DELTA_RULE_BACKWARD,
    SCAN_WORK,
    conv_flops,
    scan_flops,
)

# What brings the package fla, newer releases first.
_DISTRIBUTIONS = ("fla-core", "flash-linear-attention")


class ScanKernels(Protocol):
    """The kernels of a gated delta net; shapes as in kernels.delta_rule.

    `segments` are the documents that nothing passes between, None for whole sequences.
    """

    def causal_conv(
        self, x_BSGW: torch.Tensor, weight: torch.Tensor, segments: Segments | None
    ) -> torch.Tensor:
        """Return silu of the causal depthwise convolution of x by weight [G*W,K], in fp32."""

    def causal_conv_backward(
        self,
        grad: torch.Tensor,
        x_BSGW: torch.Tensor,
        weight: torch.Tensor,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of weight."""

    def delta_rule(
        self,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        """Run the gated delta rule over queries, keys and values side by side: [B,S,H,V].

        Queries and keys are normed to unit length. `decay` is a logarithm; it and beta are fp32.
        """

    def delta_rule_backward(
        self,
        grad: torch.Tensor,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of mixed, decay and beta."""


class TorchScans:
    """ScanKernels of plain torch operations."""

    def causal_conv(
        self, x_BSGW: torch.Tensor, weight: torch.Tensor, segments: Segments | None
    ) -> torch.Tensor:
        out: torch.Tensor = CAUSAL_CONV(x_BSGW, weight, _lengths(segments))
        return out

    def causal_conv_backward(
        self,
        grad: torch.Tensor,
        x_BSGW: torch.Tensor,
        weight: torch.Tensor,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x, grad_weight = CAUSAL_CONV_BACKWARD(grad, x_BSGW, weight, _lengths(segments))
        return grad_x, grad_weight

    def delta_rule(
        self,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        out: torch.Tensor = DELTA_RULE(mixed_BSGW, decay_BSH, beta_BSH, key_dim, _lengths(segments))
        return out

    def delta_rule_backward(
        self,
        grad: torch.Tensor,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_mixed, grad_decay, grad_beta = DELTA_RULE_BACKWARD(
            grad, mixed_BSGW, decay_BSH, beta_BSH, key_dim, _lengths(segments)
        )
        return grad_mixed, grad_decay, grad_beta


def _lengths(segments: Segments | None) -> list[int]:
    return [] if segments is None else list(segments.lengths)


class FlaScans:
    """ScanKernels of flash-linear-attention, for CUDA devices."""

    def causal_conv(
        self, x_BSGW: torch.Tensor, weight: torch.Tensor, segments: Segments | None
    ) -> torch.Tensor:
        SCAN_WORK(x_BSGW, conv_flops(x_BSGW, weight))
        return _fla_conv(x_BSGW, weight, segments)

    def causal_conv_backward(
        self,
        grad: torch.Tensor,
        x_BSGW: torch.Tensor,
        weight: torch.Tensor,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        SCAN_WORK(x_BSGW, 2 * conv_flops(x_BSGW, weight))
        grad_x, grad_weight = _differentiate(
            lambda x, taps: _fla_conv(x, taps, segments), grad, x_BSGW, weight
        )
        return grad_x, grad_weight

    def delta_rule(
        self,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        SCAN_WORK(mixed_BSGW, scan_flops(mixed_BSGW, decay_BSH, key_dim))
        return _fla_rule(mixed_BSGW, decay_BSH, beta_BSH, key_dim, segments)

    def delta_rule_backward(
        self,
        grad: torch.Tensor,
        mixed_BSGW: torch.Tensor,
        decay_BSH: torch.Tensor,
        beta_BSH: torch.Tensor,
        key_dim: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        SCAN_WORK(mixed_BSGW, 2 * scan_flops(mixed_BSGW, decay_BSH, key_dim))
        grad_mixed, grad_decay, grad_beta = _differentiate(
            lambda mixed, decay, beta: _fla_rule(mixed, decay, beta, key_dim, segments),
            grad,
            mixed_BSGW,
            decay_BSH,
            beta_BSH,
        )
        return grad_mixed, grad_decay, grad_beta


def _differentiate(
    compute: Callable[..., torch.Tensor], grad: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run `compute` again and return the gradients of its inputs."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in tensors]
        out = compute(*inputs)
    return torch.autograd.grad(out, inputs, grad)


def _fla_conv(
    x_BSGW: torch.Tensor, weight: torch.Tensor, segments: Segments | None
) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    rows = x_BSGW.flatten(2)
    bounds = None
    if segments is not None:
        rows = rows.flatten(0, 1)[None]
        bounds = segments.cu_seqlens.long()
    out, *_ = causal_conv1d(rows, weight, activation="silu", cu_seqlens=bounds)
    return out.view(x_BSGW.shape)


def _fla_rule(
    mixed_BSGW: torch.Tensor,
    decay_BSH: torch.Tensor,
    beta_BSH: torch.Tensor,
    key_dim: int,
    segments: Segments | None,
) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows = mixed_BSGW.shape[:2]
    mixed, decay, beta = mixed_BSGW, decay_BSH, beta_BSH
    bounds = None
    if segments is not None:
        mixed, decay, beta = (x.flatten(0, 1)[None] for x in (mixed, decay, beta))
        bounds = segments.cu_seqlens.long()
    heads = decay.shape[2] // mixed.shape[2]
    q, k, v = mixed.split((key_dim, key_dim, mixed.shape[3] - 2 * key_dim), -1)
    out, _ = chunk_gated_delta_rule(
        q,
        k,
        v.unflatten(-1, (heads, -1)).flatten(2, 3),
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )
    return out.view(*rows, *out.shape[2:])


def fla_version() -> str:
    """Return the version of fla-org's kernels, empty where they are not installed."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def build_fast_scans() -> ScanKernels:
    """Build the scans of a CUDA device, by fla where it is installed."""
    return FlaScans() if fla_version() else TorchScans()
