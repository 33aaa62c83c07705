"""Every kernel with the functions that implement it, and the choice among them on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from moewright.engine.kernels import columns, low_precision
from moewright.engine.kernels.fused import compiled, reference, router_losses
from moewright.engine.kernels.fused.compiled import Chain, compile_backend, compile_kernel
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.scans import TORCH_SCANS, choose_fast_scans, fla_version
from moewright.rules.row_blocks import CACHED_NUMEL
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.units import mention
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
    Kernel(name="convert", reference=low_precision.convert, triton="triton_convert"),
    Kernel(name="convert_weight", reference=low_precision.convert_weight, triton="triton_convert"),
    Kernel(name="convert_columns", reference=columns.convert_columns, triton="triton_columns"),
    Kernel(name="convert_gradient", reference=columns.convert_gradient, triton="triton_columns"),
)


def torch_kernels(block_numel: int = 0) -> KernelSet:
    """Return the kernels by operations of torch, on any device.

    Chains go through a tensor in blocks of about `block_numel` numbers; 0 takes all at once.
    """
    return KernelSet(
        implementation=FusedKernels.PLAIN,
        scans=TORCH_SCANS,
        **{kernel.name: _reference(kernel, block_numel) for kernel in KERNELS},
    )


def compiled_kernels(backend: str, block_numel: int = 0) -> KernelSet:
    """Return the kernels whose chains torch.compile makes with a backend of it.

    What moves rows and what chooses experts stays the reference's.
    """
    return KernelSet(
        implementation=FusedKernels.COMPILED,
        scans=TORCH_SCANS,
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
        scans=choose_fast_scans(),
        **{
            kernel.name: getattr(import_module(f"{package}.{kernel.triton}"), kernel.name)
            for kernel in KERNELS
        },
    )


def _reference(kernel: Kernel, block_numel: int) -> Callable[..., Any]:
    if not kernel.is_blocked:
        return kernel.reference
    return partial(kernel.reference, block_numel=block_numel)


def unavailable_reasons(
    choice: FusedKernels, device: DeviceKind, *, interpreted: bool
) -> tuple[Reason, ...]:
    """List why a job cannot have the kernels it asks for on the devices it is for.

    `interpreted`: Triton's kernels run in its interpreter, which needs no GPU.
    """
    if choice is not FusedKernels.TRITON:
        return ()
    if find_spec("triton") is None:
        rule = "needs the package triton, which is not installed here"
    elif device is not DeviceKind.CUDA and not interpreted:
        rule = "needs CUDA devices (or TRITON_INTERPRET=1, to try them slowly on a CPU)"
    else:
        return ()
    return (
        Reason(field="train.fused_kernels", value=choice, rule=rule, nearest=FusedKernels.AUTO),
    )


def implementation_name(choice: FusedKernels, device: DeviceKind) -> str:
    """Return the name of what a job gets, with its version.

    All ranks need the same: sums in other orders round apart, and ranks that hold the same tokens
    must send them to the same experts.
    """
    if _uses_triton(choice, device):
        return f"triton {version('triton')}" + mention(", fla {}", fla_version())
    if choice is FusedKernels.COMPILED:
        return f"compiled {compile_backend(is_cpu=device is DeviceKind.CPU)} {version('torch')}"
    return FusedKernels.PLAIN.value


def build_kernels(choice: FusedKernels, device: DeviceKind) -> KernelSet:
    """Build the kernels of a job."""
    is_cpu = device is DeviceKind.CPU
    block_numel = CACHED_NUMEL if is_cpu else 0
    if choice is FusedKernels.COMPILED:
        return compiled_kernels(compile_backend(is_cpu=is_cpu), block_numel)
    if not _uses_triton(choice, device):
        return torch_kernels(block_numel)
    return triton_kernels()


def _uses_triton(choice: FusedKernels, device: DeviceKind) -> bool:
    """Tell whether a job runs Triton.

    It does where it asks for it, or where it leaves the choice to a CUDA device that has the
    package.
    """
    if choice is FusedKernels.AUTO:
        return device is DeviceKind.CUDA and find_spec("triton") is not None
    return choice is FusedKernels.TRITON
