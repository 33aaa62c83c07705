"""What recurrent mixers have in common: projections with adapters, heads of a CP rank, scans.

Shapes: t of the T tokens of the TP group are this rank's between blocks; H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.fused.scans import ScanKernels
from moewright.engine.model.adapters import add_column_adapter
from moewright.engine.model.layers import Weight
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.observe.counters import Counters
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Offload
from moewright.spec.ledger import Module
from moewright.spec.model import RecurrentSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanSettings:
    """What a scan needs besides its tensors; `segments` as in ScanKernels."""

    key_dim: int
    counters: Counters
    scans: ScanKernels
    segments: Segments | None


class RecurrentMixer(nn.Module):
    """A mixer that carries a state along the sequence: [t,H] -> [t,H]."""

    ledger_module = Module.ATTENTION

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        spec = runtime.model.recurrent
        if spec is None:
            raise ValueError("a recurrent layer needs model.recurrent")
        self._runtime = runtime
        self._spec = spec


def build_scan_settings(
    runtime: Runtime, spec: RecurrentSpec, segments: Segments | None
) -> ScanSettings:
    """Return the settings of the scans of a model's recurrent layers."""
    return ScanSettings(
        key_dim=spec.key_dim,
        counters=runtime.counters,
        scans=runtime.kernels.scans,
        segments=segments,
    )


def project_in(runtime: Runtime, x_tH: torch.Tensor, *linears: Weight) -> list[torch.Tensor]:
    """Project [t,H] by each of `linears`, which TP cuts by rows: [T, rows of this rank]."""
    manager = runtime.saved_tensors
    with (
        manager.offload(x_tH, enabled=runtime.offloads(Offload.QKV_LINEAR)),
        manager.keep_converted(x_tH, linears[0].products),
    ):
        outputs = ColumnParallelLinear.apply(
            x_tH,
            runtime.mesh.tensor_parallel,
            linears[0].products,
            runtime.weight_grads,
            *(linear.weight for linear in linears),
        )
        return [
            add_column_adapter(runtime, linear, y, x_tH)
            for linear, y in zip(linears, outputs, strict=True)
        ]


def take_own_heads(runtime: Runtime, part: Weight) -> torch.Tensor:
    """Return the rows of a weight that are of the heads of this CP rank.

    CP ranks exchange heads for tokens before a recurrence, and back behind it.
    """
    group = runtime.mesh.group("cp")
    return part.weight.chunk(group.size)[group.index]
