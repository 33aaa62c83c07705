"""The kernels of recurrent mixers: torch's on any device, fla-org's where they are installed.

What is kept for backward is the same with either: fla's kernels run again from their inputs, by
their public functions alone, so that no release of theirs changes what a layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.causal_conv import CAUSAL_CONV, CAUSAL_CONV_BACKWARD
from moewright.engine.kernels.delta_rule import DELTA_RULE, DELTA_RULE_BACKWARD, SCAN_WORK
from moewright.engine.kernels.operations import find_work
from moewright.engine.kernels.state_space import STATE_SPACE, STATE_SPACE_BACKWARD

# What brings the package fla, newer releases first.
_DISTRIBUTIONS = ("fla-core", "flash-linear-attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A scan, and its backward, which takes the gradient before the same arguments.

    The last of them are the documents that nothing passes between, None for whole sequences.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanKernels:
    """The scans of recurrent mixers; shapes as in kernels.delta_rule and kernels.state_space."""

    # (x_BSGW, weight, segments): silu of the causal depthwise convolution of x by weight [G*W,K],
    # in fp32; backward returns the gradients of both.
    causal_conv: Scan

    # (mixed_BSGW, decay_BSH, beta_BSH, key_dim, segments): the gated delta rule over queries, keys
    # and values side by side: [B,S,H,V]. Queries and keys are normed to unit length. `decay` is a
    # logarithm; it and beta are fp32. Backward returns the gradients of the three.
    delta_rule: Scan

    # (inputs_BSGW, step_BSH, weights, state, segments): Mamba-2's convolution and state space over
    # projected columns and steps: [B,S,H,P]. Keys are `state` wide; `weights` is a list. Backward
    # returns the gradients of the columns, the steps and the list of the weights.
    state_space: Scan


def _by_operations(operation: Any, backward: Any) -> Scan:
    """Return a scan by two operations of this package, which take the lengths of documents."""

    def run(function: Any, args: tuple[Any, ...]) -> Any:
        *others, segments = args
        return function(*others, [] if segments is None else list(segments.lengths))

    return Scan(
        forward=lambda *args: run(operation, args), backward=lambda *args: run(backward, args)
    )


def _by_fla(compute: Callable[..., torch.Tensor], operation: Any) -> Scan:
    """Return a scan by kernels of fla, whose work is that of the operation they are equal to."""
    work = find_work(operation)
    assert work is not None  # scans have FLOPs

    def forward(*args: Any) -> torch.Tensor:
        SCAN_WORK(args[0], work.count(*args))
        return compute(*args)

    def backward(grad: torch.Tensor, *args: Any) -> tuple[Any, ...]:
        SCAN_WORK(args[0], 2 * work.count(*args))
        return _differentiate(compute, grad, args)

    return Scan(forward=forward, backward=backward)


def _differentiate(
    compute: Callable[..., torch.Tensor], grad: torch.Tensor, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `compute` again and return the gradients of its tensors, a list for a list of them."""
    with torch.enable_grad():
        # Leaves of this graph alone, so that no other gradient is touched.
        leaves = [_detach(item) for item in args]
        out = compute(*leaves)
    parts = [item for item in leaves if isinstance(item, torch.Tensor | list)]
    tensors = [tensor for item in parts for tensor in (item if isinstance(item, list) else [item])]
    grads = iter(torch.autograd.grad(out, tensors, grad))
    return tuple(_take_gradients(item, grads) for item in parts)


def _detach(item: Any) -> Any:
    if isinstance(item, list):
        return [_detach(tensor) for tensor in item]
    return item.detach().requires_grad_() if isinstance(item, torch.Tensor) else item


def _take_gradients(item: Any, grads: Iterator[torch.Tensor]) -> Any:
    return list(islice(grads, len(item))) if isinstance(item, list) else next(grads)


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
    weights: list[torch.Tensor],
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


TORCH_SCANS = ScanKernels(
    causal_conv=_by_operations(CAUSAL_CONV, CAUSAL_CONV_BACKWARD),
    delta_rule=_by_operations(DELTA_RULE, DELTA_RULE_BACKWARD),
    state_space=_by_operations(STATE_SPACE, STATE_SPACE_BACKWARD),
)
FLA_SCANS = ScanKernels(
    causal_conv=_by_fla(_fla_conv, CAUSAL_CONV),
    delta_rule=_by_fla(_fla_rule, DELTA_RULE),
    state_space=_by_fla(_fla_state_space, STATE_SPACE),
)


def choose_fast_scans() -> ScanKernels:
    """Return the scans of a CUDA device, by fla where it is installed."""
    return FLA_SCANS if fla_version() else TORCH_SCANS
