"""Operands of weight gradients: numbers of 8 or 4 bits with scales along the rows of a tensor.

A weight gradient contracts rows, the tokens of a rank. Its operands are transposed: a tensor [R,K]
becomes [K,R], with blocks of rows that lie beside each other. Rows of experts are spread first, so
that no block holds those of two; what a last block lacks is zeros.

Shapes: R rows, K columns, P rows with those that fill blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    Convert,
    GroupPadding,
    Groups,
    NarrowTensor,
    convert,
    rotate_rows,
)
from moewright.rules.low_precision import OperandFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnForm:
    """How a tensor [R,K] becomes an operand [K,P] of a weight gradient.

    `kept` is the format to which numbers were rounded along their columns when an input was kept:
    one that a recomputation made again is rounded like it. None leaves them as they come. With
    `padding` rows are spread by it. `hadamard_rows` are rotated together; 0: none.
    """

    operand: OperandFormat
    kept: OperandFormat | None = None
    padding: GroupPadding | None = None
    hadamard_rows: int = 0

    def padded_rows(self, rows: int) -> int:
        """Return P for R rows."""
        if self.padding is not None:
            return self.padding.rows
        return rows + -rows % max(self.operand.block, self.hadamard_rows)

    @property
    def groups(self) -> Groups:
        """The groups of columns of the operand that have scales of their own."""
        if self.padding is None:
            return ONE_GROUP
        return Groups(ends=self.padding.ends, of_columns=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowGradient:
    """The gradient of an output [R,N], converted for the products that read it.

    `rows` is along the columns, for the gradient of the input; `columns` along the rows, for that
    of the weight, or None where `rows` is transposed for it. `padding` spreads the rows of experts.
    """

    dtype: torch.dtype
    rows: NarrowTensor
    columns: NarrowTensor | None
    padding: GroupPadding | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowInput:
    """An input [R,K] as it was kept for backward: `rows`, converted along its columns.

    `dtype`, `shape` and `device` are those of the input.
    """

    dtype: torch.dtype
    rows: NarrowTensor

    def __len__(self) -> int:
        return len(self.rows.codes)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self.rows.columns))

    @property
    def device(self) -> torch.device:
        return self.rows.codes.device

    def widen(self) -> torch.Tensor:
        """Return the numbers that were kept."""
        return self.rows.widen(self.dtype)


def convert_columns(
    x_RK: torch.Tensor | NarrowInput,
    form: ColumnForm,
    generator: torch.Generator | None = None,
    by: Convert = convert,
) -> NarrowTensor:
    """Convert a tensor along its rows, an operation at a time: [K,P]."""
    if isinstance(x_RK, NarrowInput):
        x_RK = x_RK.widen()
    rows = len(x_RK)
    if form.kept is not None:
        x_RK = by(x_RK, form.kept, ONE_GROUP, None).widen(x_RK.dtype)
    if form.padding is None:
        missing = form.padded_rows(rows) - rows
        # Zeros add nothing to the product over the rows.
        x_RK = torch.nn.functional.pad(x_RK, (0, 0, 0, missing))
    else:
        x_RK = form.padding.pad(x_RK)
    if form.hadamard_rows:
        x_RK = rotate_rows(x_RK, form.hadamard_rows)
    # Conversion goes along columns, which the contracted rows are of the transpose.
    return by(x_RK.mT, form.operand, form.groups, generator)


def convert_gradient(g_RN: torch.Tensor, form: ColumnForm) -> NarrowGradient | None:
    """Convert a gradient along its columns and its rows; None where nothing is shared by both."""
    return None


ConvertColumns = Callable[
    [torch.Tensor | NarrowInput, ColumnForm, torch.Generator | None], NarrowTensor
]
ConvertGradient = Callable[[torch.Tensor, ColumnForm], NarrowGradient | None]
