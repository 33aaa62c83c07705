"""The choice of the kernels that a job gets on a device."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from moewright.engine.kernels.fused.compiled import compile_backend
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.scans import fla_version
from moewright.engine.kernels.fused.table import compiled_kernels, torch_kernels, triton_kernels
from moewright.rules.row_blocks import CACHED_NUMEL
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import FusedKernels


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
        scans = fla_version()
        return f"triton {version('triton')}" + (f", fla {scans}" if scans else "")
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
