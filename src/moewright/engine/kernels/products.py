"""The three products of a linear layer, in 16 bits or more or by a recipe of 8 or 4 bits.

A linear layer y = x w^T makes a product in forward and two in backward: g w, the gradient of its
input, and g^T x, the gradient of its weight. Low-precision products convert both operands along
the contraction and multiply the converted numbers with fp32 sums (kernels.scaled_products, of
experts kernels.scaled_groups).

Shapes: R rows, K in, N out, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moewright.engine.kernels.columns import (
    ColumnForm,
    ConvertColumns,
    ConvertGradient,
    NarrowGradient,
    NarrowInput,
    convert_columns,
    convert_gradient,
)
from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    Convert,
    ConvertWeight,
    GroupPadding,
    Groups,
    NarrowTensor,
    NarrowWeight,
    convert,
    convert_matrices,
    convert_weight,
    pad_groups,
    rotate_rows,
)
from moewright.engine.kernels.matmul import grouped_matmul, matmul
from moewright.engine.kernels.scaled_groups import (
    contract_groups,
    contract_rows,
    find_gradient_product,
    multiply_groups,
    pad_to_tiles,
)
from moewright.engine.kernels.scaled_products import (
    ScaledProduct,
    find_product,
    multiply,
    multiply_scaled,
)
from moewright.engine.kernels.weight_copies import WeightCopies
from moewright.rules.low_precision import NarrowFormat, OperandFormat, Recipe

# The gradient of an output: as it came, or converted for both products that read it.
Gradient = torch.Tensor | NarrowGradient
# The input of a weight gradient: as it came, or as it was kept.
Input = torch.Tensor | NarrowInput


class Products(Protocol):
    """The products of linear layers; with `ends` [E] those of experts, whose rows end there."""

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x w^T [R,N], for w [N,K] or [E,N,K]."""
        ...

    def forward_each(
        self, x_RK: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return x w^T [R,N] for each w [N,K]; the input is converted once."""
        ...

    def begin_backward(
        self, g_RN: torch.Tensor, x_RK: Input, ends: torch.Tensor | None = None
    ) -> Gradient:
        """Return a gradient for `input_grad` and `weight_grad`, which both read it now.

        It is converted here once for both where that is less work. `x_RK` is the input.
        """
        ...

    def input_grad(
        self, g_RN: Gradient, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return g w [R,K], for w [N,K] or [E,N,K]."""
        ...

    def weight_grad(
        self, g_RN: Gradient, x_RK: Input, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return g^T x [N,K] or [E,N,K]."""
        ...

    def weight_grad_each(self, gradients: Sequence[Gradient], x_RK: Input) -> list[torch.Tensor]:
        """Return g^T x [N,K] for each g [R,N]; the input is converted once."""
        ...

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        """Return what is kept of an input for backward; None for the input itself."""
        ...

    def hold_input(self, x_RK: torch.Tensor) -> HeldInput | None:
        """Return what backward takes an input from as it is kept; None where it is kept as it is.

        An operation that holds it saves nothing else of it.
        """
        ...

    def begin_step(self, step: int) -> None:
        """Start the random rounding of a step anew."""
        ...


class WideProducts:
    """Products in the dtype of their operands."""

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if ends is None:
            return matmul(x_RK, w.T)
        return grouped_matmul(x_RK, w.mT, ends)

    def forward_each(
        self, x_RK: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return [matmul(x_RK, w.T) for w in weights]

    def begin_backward(
        self, g_RN: torch.Tensor, x_RK: Input, ends: torch.Tensor | None = None
    ) -> Gradient:
        return g_RN

    def input_grad(
        self, g_RN: Gradient, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(g_RN, torch.Tensor)
        if ends is None:
            return matmul(g_RN, w)
        return grouped_matmul(g_RN, w, ends)

    def weight_grad(
        self, g_RN: Gradient, x_RK: Input, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(g_RN, torch.Tensor)
        assert isinstance(x_RK, torch.Tensor)
        if ends is None:
            return matmul(g_RN.T, x_RK)
        return grouped_matmul(g_RN.T, x_RK, ends)

    def weight_grad_each(self, gradients: Sequence[Gradient], x_RK: Input) -> list[torch.Tensor]:
        return [self.weight_grad(g_RN, x_RK) for g_RN in gradients]

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return None

    def hold_input(self, x_RK: torch.Tensor) -> HeldInput | None:
        return None

    def begin_step(self, step: int) -> None:
        pass


WIDE_PRODUCTS = WideProducts()


class HeldInput(Protocol):
    """An input that is kept in fewer bits, for one operation's backward."""

    def take(self) -> NarrowInput:
        """Return it as it is kept, once."""
        ...

    def take_wide(self) -> torch.Tensor:
        """Return it in the dtype that it had, once."""
        ...


class KeptInputs(Protocol):
    """The inputs that the forward which runs keeps in fewer bits."""

    def find_converted(self, x: torch.Tensor, products: Products) -> NarrowTensor | None:
        """Return what is kept of a tensor by these products' conversion; None for nothing."""
        ...

    def hold_converted(self, x: torch.Tensor, products: Products) -> HeldInput | None:
        """Keep what is kept of a tensor for one more operation; None where nothing is."""
        ...


class _NothingKept:
    """No input is kept in fewer bits."""

    def find_converted(self, x: torch.Tensor, products: Products) -> NarrowTensor | None:
        return None

    def hold_converted(self, x: torch.Tensor, products: Products) -> HeldInput | None:
        return None


NOTHING_KEPT = _NothingKept()


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversions:
    """What converts operands: an operation at a time, or an implementation's kernels."""

    convert: Convert = convert
    convert_weight: ConvertWeight = convert_weight
    convert_columns: ConvertColumns = convert_columns
    convert_gradient: ConvertGradient = convert_gradient


class NarrowProducts:
    """Products of operands that a recipe converts; `seed` is for numbers rounded at random."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        seed: int,
        conversions: Conversions | None = None,
        copies: WeightCopies | None = None,
        kept: KeptInputs = NOTHING_KEPT,
    ) -> None:
        self._recipe = recipe
        self._conversions = conversions or Conversions()
        self._copies = copies or WeightCopies()
        self._kept = kept
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)

    def begin_step(self, step: int) -> None:
        # By the step, so that a run that goes on from a checkpoint draws the same.
        self._generator.manual_seed((self._seed * 1_000_003 + step) % (1 << 63))

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply_rows(self._take_rows(x_RK, ends), w, ends, x_RK.dtype)

    def forward_each(
        self, x_RK: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        x = self._take_rows(x_RK, None)
        return [self._multiply_rows(x, w, None, x_RK.dtype) for w in weights]

    def _multiply_rows(
        self,
        x_RK: NarrowTensor,
        w: torch.Tensor,
        ends: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        copies = self._find_copies(w)
        weights = self._convert_weights(w) if copies is None else copies.forward
        return multiply_by_weights(x_RK, weights, w.shape, ends, dtype)

    def begin_backward(
        self, g_RN: torch.Tensor, x_RK: Input, ends: torch.Tensor | None = None
    ) -> Gradient:
        # With one scale for all, one conversion serves both products: it may be transposed.
        if not self._recipe.gradients.block:
            return NarrowGradient(
                dtype=g_RN.dtype,
                rows=self._convert_gradient(g_RN, Groups(ends=ends)),
                columns=None,
                padding=None,
            )
        product = self._find_gradient_product(g_RN.shape[1], x_RK, ends)
        form = self._gradient_form(self._plan_padding(product, len(x_RK), ends))
        return self._conversions.convert_gradient(g_RN, form) or g_RN

    def input_grad(
        self, g_RN: Gradient, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(g_RN, NarrowGradient):
            g = g_RN.rows
        else:
            g = self._convert_gradient(g_RN, Groups(ends=ends))
        kept = self._find_copies(w)
        weights = self._convert_weights(w.mT) if kept is None else kept.transposed
        return multiply_by_weights(g, weights, w.mT.shape, ends, g_RN.dtype)

    def weight_grad(
        self, g_RN: Gradient, x_RK: Input, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._recipe.inputs.block:
            return self._contract_rows(g_RN, self._take_rows(x_RK, ends), ends, x_RK.dtype)
        if isinstance(g_RN, NarrowGradient):
            product = self._find_gradient_product(g_RN.rows.columns, x_RK, ends)
            padding = g_RN.padding
        else:
            product = self._find_gradient_product(g_RN.shape[1], x_RK, ends)
            padding = self._plan_padding(product, len(x_RK), ends)
        x = self._convert_input_columns(x_RK, padding)
        if product is not None:
            g = self._take_columns(g_RN, padding)
            return contract_groups(product, g, x, len(x_RK))
        return self._contract_columns(g_RN, x, (len(x_RK), x_RK.dtype), padding, ends)

    def weight_grad_each(self, gradients: Sequence[Gradient], x_RK: Input) -> list[torch.Tensor]:
        rows, dtype = len(x_RK), x_RK.dtype
        if not self._recipe.inputs.block:
            x = self._take_rows(x_RK, None)
            return [self._contract_rows(g_RN, x, None, dtype) for g_RN in gradients]
        x = self._convert_input_columns(x_RK, None)
        return [self._contract_columns(g_RN, x, (rows, dtype), None, None) for g_RN in gradients]

    def _convert_input_columns(self, x_RK: Input, padding: GroupPadding | None) -> NarrowTensor:
        """Convert an input along its rows."""
        inputs = self._recipe.inputs
        # What was kept is converted already, which changes nothing; an input that was made again is
        # not, and would give other gradients.
        is_rounded = isinstance(x_RK, NarrowInput) or inputs.number is NarrowFormat.E2M1
        form = ColumnForm(
            operand=inputs,
            kept=None if is_rounded else inputs,
            padding=padding,
            hadamard_rows=self._recipe.hadamard_rows,
        )
        return self._conversions.convert_columns(x_RK, form, None)

    def _take_columns(self, g_RN: Gradient, padding: GroupPadding | None) -> NarrowTensor:
        """Return a gradient converted along its rows."""
        if isinstance(g_RN, NarrowGradient):
            assert g_RN.columns is not None
            return g_RN.columns
        form = self._gradient_form(padding)
        return self._conversions.convert_columns(g_RN, form, self._generator)

    def _contract_columns(
        self,
        g_RN: Gradient,
        x: NarrowTensor,
        rows_and_dtype: tuple[int, torch.dtype],
        padding: GroupPadding | None,
        ends: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return g^T x of an input that is converted along its rows, as many as `rows`."""
        rows, dtype = rows_and_dtype
        rotated_rows = self._recipe.hadamard_rows
        narrow_g = self._take_columns(g_RN, padding)
        # torch's dense product would multiply the rows that fill blocks too.
        has_padding = ends is not None or x.columns > rows
        product = None if has_padding else find_product(narrow_g, x, dtype)
        if product is not None:
            return multiply_scaled(product, narrow_g, x, dtype)
        wide_dtype = torch.float32 if rotated_rows else dtype
        converted = [narrow.widen(wide_dtype).T for narrow in (x, narrow_g)]
        if rotated_rows:
            # Back again, so that the rows that pad groups need not be multiplied.
            converted = [rotate_rows(t, rotated_rows, is_inverse=True) for t in converted]
        places = slice(rows) if padding is None else padding.places
        wide_x, wide_g = (t[places].to(dtype) for t in converted)
        if ends is None:
            return matmul(wide_g.T, wide_x)
        return grouped_matmul(wide_g.T, wide_x, ends)

    def _contract_rows(
        self,
        g_RN: Gradient,
        x_RK: NarrowTensor,
        ends: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return g^T x of operands that have a scale a group, whichever dim is contracted."""
        if isinstance(g_RN, NarrowGradient):
            g = g_RN.rows
        else:
            g = self._convert_gradient(g_RN, Groups(ends=ends))
        return multiply_columns(g, x_RK, ends, dtype)

    def _find_gradient_product(
        self, width: int, x_RK: Input, ends: torch.Tensor | None
    ) -> ScaledProduct | None:
        """Return torch's product for the weight gradients of experts of `width` columns."""
        if ends is None:
            return None
        return find_gradient_product(self._recipe.gradients, self._recipe.inputs, width, x_RK)

    def _plan_padding(
        self, product: ScaledProduct | None, rows: int, ends: torch.Tensor | None
    ) -> GroupPadding | None:
        """Plan how the rows of experts are spread, for torch's product if there is one."""
        if ends is None:
            return None
        inputs = self._recipe.inputs
        if product is not None:
            return pad_to_tiles(ends, rows, inputs)
        return pad_groups(ends, rows, max(inputs.block, self._recipe.hadamard_rows))

    def _gradient_form(self, padding: GroupPadding | None) -> ColumnForm:
        return ColumnForm(
            operand=self._recipe.gradients,
            padding=padding,
            hadamard_rows=self._recipe.hadamard_rows,
        )

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return self._convert(x_RK, self._recipe.inputs, Groups(ends=ends))

    def hold_input(self, x_RK: torch.Tensor) -> HeldInput | None:
        return self._kept.hold_converted(x_RK, self)

    def _take_rows(self, x_RK: Input, ends: torch.Tensor | None) -> NarrowTensor:
        """Return an input converted along its columns: as it is kept, where it is."""
        if isinstance(x_RK, NarrowInput):
            return x_RK.rows
        kept = self._kept.find_converted(x_RK, self)
        if kept is not None:
            return kept
        return self._convert(x_RK, self._recipe.inputs, Groups(ends=ends))

    def _convert(
        self, x: torch.Tensor, operand: OperandFormat, groups: Groups = ONE_GROUP
    ) -> NarrowTensor:
        return self._conversions.convert(x, operand, groups, None)

    def _convert_gradient(self, g: torch.Tensor, groups: Groups) -> NarrowTensor:
        return self._conversions.convert(g, self._recipe.gradients, groups, self._generator)

    def _find_copies(self, w: torch.Tensor) -> NarrowWeight | None:
        """Return the copies of a weight [N,K] or [E,N,K] that a step keeps; None for none."""
        weights = self._recipe.weights
        return self._copies.find(w, lambda: self._conversions.convert_weight(w, weights))

    def _convert_weights(self, w: torch.Tensor) -> NarrowTensor:
        return convert_matrices(w, self._recipe.weights, self._conversions.convert)


def multiply_by_weights(
    a: NarrowTensor,
    weights: NarrowTensor,
    shape: torch.Size,
    ends: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a w^T of weights of a `shape` [N,K] or [E,N,K] that are converted along K, as rows."""
    if ends is None:
        return multiply(a, weights, dtype)
    return multiply_groups(a, weights, shape, ends, dtype)


def multiply_columns(
    g_RN: NarrowTensor, x_RK: NarrowTensor, ends: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return g^T x [N,K] or [E,N,K] of operands with a scale a group, whatever is contracted."""
    if ends is None:
        return multiply(g_RN.transpose(), x_RK.transpose(), dtype)
    return contract_rows(g_RN, x_RK, ends, dtype)
