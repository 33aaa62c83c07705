"""The kernels that torch.compile makes of the reference's chains; importing this compiles none.

Each chain is a block of its own, as Megatron-LM's `jit_fuser` compiles them: the products,
exchanges and hooks between them stay what they are, so that what is kept for backward does not
change. `describe_compilation` says how many graphs came of it, and where one broke.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.kernels.fused.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from moewright.engine.torch_private import compile_counters, has_dispatch_modes, mark_dynamic
from moewright.spec.units import mention

_CPU_COMPILERS = ("g++", "clang++")  # what Inductor looks for


def compile_backend(*, is_cpu: bool) -> str:
    """Return the backend that a device gets: graphs without kernels where a CPU has no compiler."""
    if is_cpu and not any(map(shutil.which, _CPU_COMPILERS)):
        return "aot_eager"
    return "inductor"


def describe_compilation() -> str:
    """Return what this process has compiled so far, in words."""
    counters = compile_counters()
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    text = f"torch.compile: {graphs} graphs, {breaks} graph breaks"
    reasons = ", ".join(sorted(counters["graph_break"]))
    return text + mention(" ({})", reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A kernel to be compiled: its operations, and how the kernel's arguments are handed to them.

    `call` gets the compiled operations and the arguments.
    """

    operations: Callable[..., Any]
    call: Callable[..., Any]


def compile_kernel(chain: Chain, reference: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a kernel whose chain is compiled once for each kind of tensor, whatever its rows.

    A step on which operations are counted one by one runs the reference, for a compiled kernel
    would hide its own; and so does a tensor without rows.
    """
    compiled = torch.compile(chain.operations, backend=backend)

    def run(*args: Any) -> Any:
        if has_dispatch_modes() or not args[0].numel():
            return reference(*args)
        return chain.call(compiled, *args)

    return run


def _call(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call a chain whose first dim is another one every step; it has no gradient of its own."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dim():
            mark_dynamic(arg)
    with torch.no_grad():
        return compiled(*args)


def _call_rms_norm(
    compiled: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scale = _call(compiled, x.flatten(0, -2), weight, eps)
    return out.view(x.shape), scale.view(*x.shape[:-1], 1)


def _call_rms_norm_backward(
    compiled: Callable[..., Any],
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    weight_rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    x_NK = x.flatten(0, -2)
    start, stop, _ = weight_rows.indices(len(x_NK))
    flat_scale = None if scale is None else scale.reshape(-1, 1)
    grad_x, grad_weight = _call(
        compiled, grad.flatten(0, -2), x_NK, weight, eps, flat_scale, start, stop
    )
    return grad_x.view(x.shape), grad_weight


def _swiglu(x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool) -> torch.Tensor:
    gate, up = x_R2F.float().chunk(2, -1)
    if clamped:
        gate = gate.clamp(max=SWIGLU_LIMIT)
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        act = torch.sigmoid(SWIGLU_ALPHA * gate) * gate * up
    else:
        act = F.silu(gate) * up
    if weight_R is not None:
        act = act * weight_R[:, None]
    return act.to(x_R2F.dtype)


def _swiglu_backward(
    grad_RF: torch.Tensor,
    x_R2F: torch.Tensor,
    weight_R: torch.Tensor | None,
    clamped: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    raw_gate, raw_up = x_R2F.float().chunk(2, -1)
    gate, up = raw_gate, raw_up
    grad = grad_RF.float()
    if clamped:
        gate = raw_gate.clamp(max=SWIGLU_LIMIT)
        up = raw_up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        sigmoid = torch.sigmoid(SWIGLU_ALPHA * gate)
        slope = sigmoid * (1 + SWIGLU_ALPHA * gate * (1 - sigmoid)) * (raw_gate <= SWIGLU_LIMIT)
        passes = (raw_up.abs() <= SWIGLU_LIMIT).float()
    else:
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        passes = torch.ones_like(up)
    act = sigmoid * gate
    grad_act = grad * up
    grad_weight = None
    if weight_R is not None:
        grad_weight = (grad_act * act).sum(-1).to(weight_R.dtype)
        grad_act = grad_act * weight_R[:, None]
        act = act * weight_R[:, None]
    grad_x = torch.cat((slope * grad_act, act * grad * passes), -1)
    return grad_x.to(x_R2F.dtype), grad_weight


def _rms_norm(
    x_NK: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x_NK.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x_NK.dtype) * weight, scale


def _rms_norm_backward(
    grad_NK: torch.Tensor,
    x_NK: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x_NK.float()
    if scale is None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    grad = grad_NK.float()
    product = grad * normed
    mean = (product * weight.float()).mean(-1, keepdim=True)
    grad_x = (grad * weight.float() - normed * mean) * scale
    rows = torch.arange(len(x_NK), device=x_NK.device)[:, None]
    grad_weight = (product * ((rows >= start) & (rows < stop))).sum(0)
    return grad_x.to(x_NK.dtype), grad_weight.to(weight.dtype)


def _rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_BSHD.float().chunk(2, -1)
    cos = cos.unsqueeze(-2)
    sin = sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSHD.dtype)


def _cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    wide = logits_TV.float()
    chosen = wide.gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    return wide.logsumexp(-1) - chosen


def _sum_exp(logits_TV: torch.Tensor, max_T: torch.Tensor) -> torch.Tensor:
    return (logits_TV.float() - max_T[:, None]).exp().sum(-1)


def _cross_entropy_backward(
    grad_T: torch.Tensor,
    logits_TV: torch.Tensor,
    columns_T: torch.Tensor,
    log_sum_T: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    wide = logits_TV.float()
    if log_sum_T is None:
        log_sum_T = wide.logsumexp(-1)
    columns = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    probs = (wide - log_sum_T[:, None]).exp() * (columns < size)
    at_target = columns == columns_T[:, None]  # -1 is no column
    return ((probs - at_target.float()) * grad_T[:, None]).to(logits_TV.dtype)


SWIGLU = Chain(operations=_swiglu, call=_call)
SWIGLU_BACKWARD = Chain(operations=_swiglu_backward, call=_call)
RMS_NORM = Chain(operations=_rms_norm, call=_call_rms_norm)
RMS_NORM_BACKWARD = Chain(operations=_rms_norm_backward, call=_call_rms_norm_backward)
ROTATE = Chain(operations=_rotate, call=_call)
CROSS_ENTROPY = Chain(operations=_cross_entropy, call=_call)
SUM_EXP = Chain(operations=_sum_exp, call=_call)
CROSS_ENTROPY_BACKWARD = Chain(operations=_cross_entropy_backward, call=_call)
