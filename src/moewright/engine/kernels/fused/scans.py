"""The kernels of recurrent mixers: torch's on any device, fla-org's where they are installed.

What is kept for backward is the same with either: fla's kernels run again from their inputs, by
their public functions alone, so that no release of theirs changes what a layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.causal_conv import (
    CAUSAL_CONV,
    CAUSAL_CONV_BACKWARD,
    conv_flops,
)
from moewright.engine.kernels.delta_rule import (
    DELTA_RULE,
    DELTA_RULE_BACKWARD,
    SCAN_WORK,
    scan_flops,
)
from moewright.engine.kernels.state_space import (
    STATE_SPACE,
    STATE_SPACE_BACKWARD,
    state_space_flops,
)

# What brings the package fla, newer releases first.
_DISTRIBUTIONS = ("fla-core", "flash-linear-attention")


class ScanKernels(Protocol):
    """The kernels of recurrent mixers; shapes as in kernels.delta_rule and kernels.state_space.

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

    def state_space(
        self,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        """Run Mamba-2's convolution and state space over projected columns and steps: [B,S,H,P].

        Keys are `state` wide.
        """

    def state_space_backward(
        self,
        grad: torch.Tensor,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        """Return the gradients of the columns, the steps and the weights."""


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

    def state_space(
        self,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        lengths = _lengths(segments)
        out: torch.Tensor = STATE_SPACE(inputs_BSGW, step_BSH, list(weights), state, lengths)
        return out

    def state_space_backward(
        self,
        grad: torch.Tensor,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        grad_inputs, grad_step, grad_weights = STATE_SPACE_BACKWARD(
            grad, inputs_BSGW, step_BSH, list(weights), state, _lengths(segments)
        )
        return grad_inputs, grad_step, grad_weights


def _lengths(segments: Segments | None) -> list[int]:
    if segments is None:
        return []
    return list(segments.lengths)


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

    def state_space(
        self,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> torch.Tensor:
        SCAN_WORK(inputs_BSGW, state_space_flops(inputs_BSGW, step_BSH, state))
        return _fla_state_space(inputs_BSGW, step_BSH, weights, state, segments)

    def state_space_backward(
        self,
        grad: torch.Tensor,
        inputs_BSGW: torch.Tensor,
        step_BSH: torch.Tensor,
        weights: Sequence[torch.Tensor],
        state: int,
        segments: Segments | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        SCAN_WORK(inputs_BSGW, 2 * state_space_flops(inputs_BSGW, step_BSH, state))
        grad_inputs, grad_step, *grad_weights = _differentiate(
            lambda inputs, step, *own: _fla_state_space(inputs, step, own, state, segments),
            grad,
            inputs_BSGW,
            step_BSH,
            *weights,
        )
        return grad_inputs, grad_step, grad_weights


def _differentiate(
    compute: Callable[..., torch.Tensor], grad: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run `compute` again and return the gradients of its inputs."""
    with torch.enable_grad():
        # Leaves of this graph alone, so that no other gradient is touched.
        inputs = [x.detach().requires_grad_() for x in tensors]
        out = compute(*inputs)
    return torch.autograd.grad(out, inputs, grad)


def _pack(segments: Segments | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Return where documents start and end, with tensors [B,S,...] in one sequence; None without.

    fla-org's kernels take documents as one packed sequence alone.
    """
    if segments is None:
        return None, *tensors
    # In int64, as fla-org's kernels take them.
    return segments.cu_seqlens.long(), *(x.flatten(0, 1)[None] for x in tensors)


def _fla_conv(
    x_BSGW: torch.Tensor,
    weight: torch.Tensor,
    segments: Segments | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    bounds, rows = _pack(segments, x_BSGW.flatten(2))
    out, *_ = causal_conv1d(rows, weight, bias, activation="silu", cu_seqlens=bounds)
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
    bounds, mixed, decay, beta = _pack(segments, mixed_BSGW, decay_BSH, beta_BSH)
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


def _fla_state_space(
    inputs_BSGW: torch.Tensor,
    step_BSH: torch.Tensor,
    weights: Sequence[torch.Tensor],
    state: int,
    segments: Segments | None,
) -> torch.Tensor:
    """Run linear attention whose decay is that of the state and whose values are dt x."""
    from fla.ops.simple_gla import chunk_simple_gla

    conv, dt_bias, a_log, skip, *conv_bias = weights
    mixed = _fla_conv(inputs_BSGW, conv, segments, *conv_bias)
    step = torch.nn.functional.softplus(step_BSH.float() + dt_bias.float())
    rows = step.shape[:2]
    bounds, mixed, step = _pack(segments, mixed, step)
    sharing = step.shape[2] // mixed.shape[2]
    x, k, q = mixed.split((mixed.shape[3] - 2 * state, state, state), -1)
    values = x.unflatten(-1, (sharing, -1)).flatten(2, 3)
    out, _ = chunk_simple_gla(
        q.repeat_interleave(sharing, 2),
        k.repeat_interleave(sharing, 2),
        (step[..., None] * values).to(values.dtype),
        g=-a_log.float().exp() * step,
        scale=1.0,
        cu_seqlens=bounds,
    )
    return (out + skip[:, None] * values).to(out.dtype).view(*rows, *out.shape[2:])


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
