"""Every kernel with the functions that implement it: a new kernel is a field and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from moewright.engine.kernels.fused import compiled, reference, router_losses
from moewright.engine.kernels.fused.compiled import Chain, compile_kernel
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.scans import TorchScans, build_fast_scans
from moewright.spec.workload import FusedKernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel's implementations.

    `name` is that of its field of KernelSet and of its function in the module `triton` of this
    package. `is_blocked`: the reference goes through its tensors in blocks. `chain` is what
    torch.compile makes a kernel of; None where the reference stays. `backward` names the kernel of
    the gradient: "" where it has none, is its own, or is differentiated by autograd.
    """

    name: str
    reference: Callable[..., Any]
    triton: str
    is_blocked: bool = False
    chain: Chain | None = None
    backward: str = ""


KERNELS = (
    Kernel(name="permute", reference=reference.permute, triton="triton_rows", backward="unpermute"),
    Kernel(
        name="unpermute", reference=reference.unpermute, triton="triton_rows", backward="permute"
    ),
    Kernel(
        name="swiglu",
        reference=reference.swiglu,
        triton="triton_rows",
        is_blocked=True,
        chain=compiled.SWIGLU,
        backward="swiglu_backward",
    ),
    Kernel(
        name="swiglu_backward",
        reference=reference.swiglu_backward,
        triton="triton_rows",
        is_blocked=True,
        chain=compiled.SWIGLU_BACKWARD,
    ),
    Kernel(
        name="rms_norm",
        reference=reference.rms_norm,
        triton="triton_norm",
        is_blocked=True,
        chain=compiled.RMS_NORM,
        backward="rms_norm_backward",
    ),
    Kernel(
        name="rms_norm_backward",
        reference=reference.rms_norm_backward,
        triton="triton_norm",
        is_blocked=True,
        chain=compiled.RMS_NORM_BACKWARD,
    ),
    Kernel(
        name="rotate",
        reference=reference.rotate,
        triton="triton_rows",
        is_blocked=True,
        chain=compiled.ROTATE,
        backward="rotate",
    ),
    Kernel(
        name="cross_entropy",
        reference=reference.cross_entropy,
        triton="triton_loss",
        is_blocked=True,
        chain=compiled.CROSS_ENTROPY,
        backward="cross_entropy_backward",
    ),
    Kernel(
        name="sum_exp",
        reference=reference.sum_exp,
        triton="triton_loss",
        is_blocked=True,
        chain=compiled.SUM_EXP,
        backward="cross_entropy_backward",
    ),
    Kernel(
        name="cross_entropy_backward",
        reference=reference.cross_entropy_backward,
        triton="triton_loss",
        is_blocked=True,
        chain=compiled.CROSS_ENTROPY_BACKWARD,
    ),
    Kernel(name="route_tokens", reference=reference.route_tokens, triton="triton_router"),
    Kernel(
        name="router_losses",
        reference=router_losses.router_losses,
        triton="triton_router_losses",
    ),
)


def torch_kernels(block_numel: int = 0) -> KernelSet:
    """Return the kernels by operations of torch, on any device.

    Chains go through a tensor in blocks of about `block_numel` numbers; 0 takes all at once.
    """
    return KernelSet(
        implementation=FusedKernels.PLAIN,
        scans=TorchScans(),
        **{kernel.name: _reference(kernel, block_numel) for kernel in KERNELS},
    )


def compiled_kernels(backend: str, block_numel: int = 0) -> KernelSet:
    """Return the kernels whose chains torch.compile makes with a backend of it.

    What moves rows and what chooses experts stays the reference's.
    """
    return KernelSet(
        implementation=FusedKernels.COMPILED,
        scans=TorchScans(),
        **{
            kernel.name: _reference(kernel, block_numel)
            if kernel.chain is None
            else compile_kernel(kernel.chain, _reference(kernel, block_numel), backend)
            for kernel in KERNELS
        },
    )


def triton_kernels() -> KernelSet:
    """Return Triton's kernels, for CUDA devices and Triton's interpreter.

    Triton is imported here, for a job that uses it, and nowhere else.
    """
    package = __name__.rpartition(".")[0]
    return KernelSet(
        implementation=FusedKernels.TRITON,
        scans=build_fast_scans(),
        **{
            kernel.name: getattr(import_module(f"{package}.{kernel.triton}"), kernel.name)
            for kernel in KERNELS
        },
    )


def _reference(kernel: Kernel, block_numel: int) -> Callable[..., Any]:
    if not kernel.is_blocked:
        return kernel.reference
    return partial(kernel.reference, block_numel=block_numel)
