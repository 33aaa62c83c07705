"""The kernels that torch.compile makes of the reference's chains; importing this compiles none.

Each chain is a block of its own, as Megatron-LM's `jit_fuser` compiles them: the products,
exchanges and hooks between them stay what they are, so that what is kept for backward does not
change. `describe_compilation` says how many graphs came of it, and where one broke.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.kernels.fused.reference import SWIGLU_ALPHA, SWIGLU_LIMIT, TorchKernels
from moewright.engine.torch_private import compile_counters, has_dispatch_modes, mark_dynamic

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
    return f"{text} ({reasons})" if reasons else text


class CompiledKernels(TorchKernels):
    """A KernelSet whose chains are compiled once for each kind of tensor, whatever its rows.

    What moves rows and what chooses experts stays the reference's, and so does a step on which
    operations are counted one by one.
    """

    def __init__(self, backend: str, block_numel: int = 0) -> None:
        super().__init__(block_numel)
        compile_chain = partial(torch.compile, backend=backend)
        self._swiglu = compile_chain(_swiglu)
        self._swiglu_backward = compile_chain(_swiglu_backward)
        self._rms_norm = compile_chain(_rms_norm)
        self._rms_norm_backward = compile_chain(_rms_norm_backward)
        self._rotate = compile_chain(_rotate)
        self._cross_entropy = compile_chain(_cross_entropy)
        self._sum_exp = compile_chain(_sum_exp)
        self._cross_entropy_backward = compile_chain(_cross_entropy_backward)

    def swiglu(
        self, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
    ) -> torch.Tensor:
        if has_dispatch_modes() or not x_R2F.numel():
            return super().swiglu(x_R2F, weight_R, clamped)
        return _run(self._swiglu, x_R2F, weight_R, clamped)

    def swiglu_backward(
        self,
        grad_RF: torch.Tensor,
        x_R2F: torch.Tensor,
        weight_R: torch.Tensor | None,
        clamped: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if has_dispatch_modes() or not x_R2F.numel():
            return super().swiglu_backward(grad_RF, x_R2F, weight_R, clamped)
        return _run(self._swiglu_backward, grad_RF, x_R2F, weight_R, clamped)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if has_dispatch_modes() or not x.numel():
            return super().rms_norm(x, weight, eps)
        out, scale = _run(self._rms_norm, x.flatten(0, -2), weight, eps)
        return out.view(x.shape), scale.view(*x.shape[:-1], 1)

    def rms_norm_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        weight_rows: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if has_dispatch_modes() or not x.numel():
            return super().rms_norm_backward(grad, x, weight, eps, scale, weight_rows)
        x_NK = x.flatten(0, -2)
        start, stop, _ = weight_rows.indices(len(x_NK))
        flat_scale = None if scale is None else scale.reshape(-1, 1)
        grad_x, grad_weight = _run(
            self._rms_norm_backward,
            grad.flatten(0, -2),
            x_NK,
            weight,
            eps,
            flat_scale,
            start,
            stop,
        )
        return grad_x.view(x.shape), grad_weight

    def rotate(self, x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if has_dispatch_modes():
            return super().rotate(x_BSHD, cos, sin)
        return _run(self._rotate, x_BSHD, cos, sin)

    def cross_entropy(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        if has_dispatch_modes():
            return super().cross_entropy(logits_TV, targets_T)
        return _run(self._cross_entropy, logits_TV, targets_T)

    def sum_exp(self, logits_TV: torch.Tensor, max_T: torch.Tensor) -> torch.Tensor:
        if has_dispatch_modes():
            return super().sum_exp(logits_TV, max_T)
        return _run(self._sum_exp, logits_TV, max_T)

    def cross_entropy_backward(
        self,
        grad_T: torch.Tensor,
        logits_TV: torch.Tensor,
        columns_T: torch.Tensor,
        log_sum_T: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        if has_dispatch_modes():
            return super().cross_entropy_backward(grad_T, logits_TV, columns_T, log_sum_T, size)
        return _run(self._cross_entropy_backward, grad_T, logits_TV, columns_T, log_sum_T, size)


def _run(chain: Callable[..., Any], *args: Any) -> Any:
    """Run a chain whose first dim is another one every step; it has no gradient of its own."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dim():
            mark_dynamic(arg)
    with torch.no_grad():
        return chain(*args)


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
