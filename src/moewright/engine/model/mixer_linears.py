"""The projections into and out of a recurrent mixer, with their adapters.

Shapes: t of the T tokens of the TP group are this rank's between blocks; H hidden.
"""

from __future__ import annotations

import torch

from moewright.engine.model.adapters import add_column_adapter, add_row_adapter
from moewright.engine.model.layers import Weight
from moewright.engine.model.parallel_linear import ColumnParallelLinear, RowParallelLinear
from moewright.engine.runtime import Runtime
from moewright.spec.layout import Offload


def project_in(runtime: Runtime, x_tH: torch.Tensor, *linears: Weight) -> list[torch.Tensor]:
    """Project [t,H] by each of `linears`, which TP cuts by rows: [T, rows of this rank]."""
    manager = runtime.saved_tensors
    with (
        manager.offload(x_tH, enabled=runtime.offloads(Offload.QKV_LINEAR)),
        manager.keep_converted(x_tH, runtime.products.convert_input),
    ):
        outputs = ColumnParallelLinear.apply(
            x_tH,
            runtime.mesh.tensor_parallel,
            runtime.products,
            runtime.weight_grads,
            *(linear.weight for linear in linears),
        )
        return [
            add_column_adapter(runtime, linear, y, x_tH)
            for linear, y in zip(linears, outputs, strict=True)
        ]


def project_out(runtime: Runtime, rows: torch.Tensor, linear: Weight) -> torch.Tensor:
    """Project rows [T, columns of this rank] by `linear`, which TP cuts by columns: [t,H]."""
    with runtime.saved_tensors.keep_converted(rows, runtime.products.convert_input):
        projected = RowParallelLinear.apply(
            rows,
            linear.weight,
            runtime.mesh.tensor_parallel,
            runtime.products,
            runtime.weight_grads,
        )
        return add_row_adapter(runtime, linear, projected, rows)
