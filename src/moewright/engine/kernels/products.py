"""The three products of a linear layer, in 16 bits or more or by a recipe of 8 or 4 bits.

A linear layer y = x w^T makes a product in forward and two in backward: g w, the gradient of its
input, and g^T x, the gradient of its weight. Low-precision products convert both operands along
the contraction and multiply the converted numbers with fp32 sums (kernels.scaled_products, of
experts kernels.scaled_groups).

Shapes: R rows, K in, N out, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    Convert,
    ConvertWeight,
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


class Products(Protocol):
    """The products of linear layers; with `ends` [E] those of experts, whose rows end there."""

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x w^T [R,N], for w [N,K] or [E,N,K]."""
        ...

    def input_grad(
        self, g_RN: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return g w [R,K], for w [N,K] or [E,N,K]."""
        ...

    def weight_grad(
        self, g_RN: torch.Tensor, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return g^T x [N,K] or [E,N,K]."""
        ...

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        """Return what is kept of an input for backward; None for the input itself."""
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

    def input_grad(
        self, g_RN: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if ends is None:
            return matmul(g_RN, w)
        return grouped_matmul(g_RN, w, ends)

    def weight_grad(
        self, g_RN: torch.Tensor, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if ends is None:
            return matmul(g_RN.T, x_RK)
        return grouped_matmul(g_RN.T, x_RK, ends)

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return None

    def begin_step(self, step: int) -> None:
        pass


WIDE_PRODUCTS = WideProducts()


class NarrowProducts:
    """Products of operands that a recipe converts; `seed` is for numbers rounded at random."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        seed: int,
        convert: Convert = convert,
        convert_weight: ConvertWeight = convert_weight,
        copies: WeightCopies | None = None,
    ) -> None:
        self._recipe = recipe
        self._convert_by = convert
        self._convert_weight_by = convert_weight
        self._copies = copies or WeightCopies()
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)

    def begin_step(self, step: int) -> None:
        self._generator.manual_seed((self._seed * 1_000_003 + step) % (1 << 63))

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self._convert(x_RK, self._recipe.inputs, Groups(ends=ends))
        kept = self._find_copies(w)
        weights = self._convert_weights(w) if kept is None else kept.forward
        return multiply_by_weights(x, weights, w.shape, ends, x_RK.dtype)

    def input_grad(
        self, g_RN: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        g = self._convert_gradient(g_RN, Groups(ends=ends))
        kept = self._find_copies(w)
        weights = self._convert_weights(w.mT) if kept is None else kept.transposed
        return multiply_by_weights(g, weights, w.mT.shape, ends, g_RN.dtype)

    def weight_grad(
        self, g_RN: torch.Tensor, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        inputs = self._recipe.inputs
        dtype = x_RK.dtype
        kept: NarrowTensor | None = None
        if inputs.number is not NarrowFormat.E2M1:
            # A kept input is converted already, which changes nothing; one that was made again is
            # not, and would give other gradients.
            kept = self._convert(x_RK, inputs, Groups(ends=ends))
        if kept is not None and not inputs.block:
            gradient = self._convert_gradient(g_RN, Groups(ends=ends))
            if ends is None:
                return multiply(gradient.transpose(), kept.transpose(), dtype)
            return grouped_matmul(gradient.widen(dtype).T, kept.widen(dtype), ends)
        x = x_RK if kept is None else kept.widen(dtype)
        multiple = max(inputs.block, self._recipe.hadamard_rows)
        groups = ONE_GROUP
        places: torch.Tensor | slice = slice(len(x))
        grouped: ScaledProduct | None = None
        padded = [torch.nn.functional.pad(t, (0, 0, 0, -len(t) % multiple)) for t in (x, g_RN)]
        if ends is not None:
            padding = pad_groups(ends, len(x), multiple)
            grouped = find_gradient_product(self._recipe.gradients, inputs, g_RN, x)
            if grouped is not None:
                padding = pad_to_tiles(ends, len(x), inputs)
            groups, places = Groups(ends=padding.ends, of_columns=True), padding.places
            padded = [padding.pad(t) for t in (x, g_RN)]
        rotated_rows = self._recipe.hadamard_rows
        if rotated_rows:
            padded = [rotate_rows(t, rotated_rows) for t in padded]
        narrow_x = self._convert(padded[0].mT, inputs, groups)
        narrow_g = self._convert_gradient(padded[1].mT, groups)
        if grouped is not None:
            return contract_groups(grouped, narrow_g, narrow_x, len(x))
        has_padding = ends is not None or len(padded[0]) > len(x)
        product = None if has_padding else find_product(narrow_g, narrow_x, dtype)
        if product is not None:
            return multiply_scaled(product, narrow_g, narrow_x, dtype)
        wide_dtype = padded[0].dtype
        converted = [narrow.widen(wide_dtype).T for narrow in (narrow_x, narrow_g)]
        if rotated_rows:
            # Back again, so that the rows that pad groups need not be multiplied.
            converted = [rotate_rows(t, rotated_rows, is_inverse=True) for t in converted]
        x, g = (t[places].to(dtype) for t in converted)
        if ends is None:
            return matmul(g.T, x)
        return grouped_matmul(g.T, x, ends)

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return self._convert(x_RK, self._recipe.inputs, Groups(ends=ends))

    def _convert(
        self, x: torch.Tensor, operand: OperandFormat, groups: Groups = ONE_GROUP
    ) -> NarrowTensor:
        return self._convert_by(x, operand, groups, None)

    def _convert_gradient(self, g: torch.Tensor, groups: Groups) -> NarrowTensor:
        return self._convert_by(g, self._recipe.gradients, groups, self._generator)

    def _find_copies(self, w: torch.Tensor) -> NarrowWeight | None:
        """Return the copies of a weight [N,K] or [E,N,K] that a step keeps; None for none."""
        return self._copies.find(w, lambda: self._convert_weight_by(w, self._recipe.weights))

    def _convert_weights(self, w: torch.Tensor) -> NarrowTensor:
        return convert_matrices(w, self._recipe.weights, self._convert_by)


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
