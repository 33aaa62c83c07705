"""Which implementation of the seam a job gets on a device."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.run.env import is_triton_interpreted
from moewright.rules.row_blocks import CACHED_NUMEL
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import FusedKernels


def unavailable_reasons(choice: FusedKernels, device: DeviceKind) -> tuple[Reason, ...]:
    """Why the kernels that a job asks for cannot be had on the devices it is for."""
    rule = ""
    if choice is FusedKernels.TRITON:
        if find_spec("triton") is None:
            rule = "needs the package triton, which is not installed here"
        elif device is not DeviceKind.CUDA and not is_triton_interpreted():
            rule = "needs CUDA devices (or TRITON_INTERPRET=1, to try them slowly on a CPU)"
    if not rule:
        return ()
    return (
        Reason(field="train.fused_kernels", value=choice, rule=rule, nearest=FusedKernels.AUTO),
    )


def implementation_name(choice: FusedKernels, device: DeviceKind) -> str:
    """What a job gets, with its version. All ranks need the same: sums in other orders round apart,
    and ranks that hold the same tokens must send them to the same experts.
    """
    return (
        f"triton {version('triton')}" if _uses_triton(choice, device) else FusedKernels.PLAIN.value
    )


def build_kernels(choice: FusedKernels, device: DeviceKind) -> KernelSet:
    """Imports Triton where it is used, and nowhere else."""
    if not _uses_triton(choice, device):
        return TorchKernels(CACHED_NUMEL if device is DeviceKind.CPU else 0)
    from moewright.engine.kernels.fused.triton import TritonKernels

    return TritonKernels()


def _uses_triton(choice: FusedKernels, device: DeviceKind) -> bool:
    """Where it is asked for, or where nobody says and a CUDA device and the package are there."""
    found = (
        choice is FusedKernels.AUTO
        and device is DeviceKind.CUDA
        and find_spec("triton") is not None
    )
    return choice is FusedKernels.TRITON or found
