"""The three products of a linear layer, in 16 bits or more or by a recipe of 8 or 4 bits.

A linear layer y = x w^T makes a product in forward and two in backward: g w, the gradient of its
input, and g^T x, the gradient of its weight. Low-precision products convert both operands along
the contraction and multiply the converted numbers with fp32 sums. On a CPU the operands are widened
again before they are multiplied, which is the same to the rounding of the sums.

Shapes: R rows, K in, N out, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    Groups,
    NarrowTensor,
    convert,
    pad_groups,
    rotate_rows,
)
from moewright.engine.kernels.matmul import grouped_matmul, matmul
from moewright.rules.low_precision import NarrowFormat, Recipe


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
        return matmul(x_RK, w.T) if ends is None else grouped_matmul(x_RK, w.mT, ends)

    def input_grad(
        self, g_RN: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        return matmul(g_RN, w) if ends is None else grouped_matmul(g_RN, w, ends)

    def weight_grad(
        self, g_RN: torch.Tensor, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        return matmul(g_RN.T, x_RK) if ends is None else grouped_matmul(g_RN.T, x_RK, ends)

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return None

    def begin_step(self, step: int) -> None:
        pass


WIDE_PRODUCTS = WideProducts()


class NarrowProducts:
    """Products of operands that a recipe converts; `seed` is for numbers rounded at random."""

    def __init__(self, recipe: Recipe, device: torch.device, seed: int) -> None:
        self._recipe = recipe
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)

    def begin_step(self, step: int) -> None:
        self._generator.manual_seed((self._seed * 1_000_003 + step) % (1 << 63))

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = convert(x_RK, self._recipe.inputs, Groups(ends=ends)).widen(x_RK.dtype)
        weights = self._convert_weights(w)
        return matmul(x, weights.T) if ends is None else grouped_matmul(x, weights.mT, ends)

    def input_grad(
        self, g_RN: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        g = self._convert_gradient(g_RN, Groups(ends=ends))
        weights = self._convert_weights(w.mT)
        return matmul(g, weights.T) if ends is None else grouped_matmul(g, weights.mT, ends)

    def weight_grad(
        self, g_RN: torch.Tensor, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        inputs = self._recipe.inputs
        x = x_RK
        if inputs.number is not NarrowFormat.E2M1:
            # A kept input is converted already, which changes nothing; one that was made again is
            # not, and would give other gradients.
            x = convert(x_RK, inputs, Groups(ends=ends)).widen(x_RK.dtype)
        if not inputs.block:
            g = self._convert_gradient(g_RN, Groups(ends=ends))
            return matmul(g.T, x) if ends is None else grouped_matmul(g.T, x, ends)
        multiple = max(inputs.block, self._recipe.hadamard_rows)
        groups = ONE_GROUP
        places: torch.Tensor | slice = slice(len(x))
        padded = [torch.nn.functional.pad(t, (0, 0, 0, -len(t) % multiple)) for t in (x, g_RN)]
        if ends is not None:
            padding = pad_groups(ends, len(x), multiple)
            groups, places = Groups(ends=padding.ends, of_columns=True), padding.places
            padded = [padding.pad(t) for t in (x, g_RN)]
        rotated_rows = self._recipe.hadamard_rows
        if rotated_rows:
            padded = [rotate_rows(t, rotated_rows) for t in padded]
        x_RK, g_RN = padded
        converted = [convert(x_RK.mT, inputs, groups).widen(x_RK.dtype).T]
        converted.append(self._convert_gradient(g_RN.mT, groups).T)
        if rotated_rows:
            # Back again, so that the rows that pad groups need not be multiplied.
            converted = [rotate_rows(t, rotated_rows, is_inverse=True) for t in converted]
        x, g = (t[places].to(x.dtype) for t in converted)
        return matmul(g.T, x) if ends is None else grouped_matmul(g.T, x, ends)

    def convert_input(
        self, x_RK: torch.Tensor, ends: torch.Tensor | None = None
    ) -> NarrowTensor | None:
        return convert(x_RK, self._recipe.inputs, Groups(ends=ends))

    def _convert_gradient(self, g: torch.Tensor, groups: Groups) -> torch.Tensor:
        return convert(g, self._recipe.gradients, groups, self._generator).widen(g.dtype)

    def _convert_weights(self, w: torch.Tensor) -> torch.Tensor:
        """Convert weights [N,K] or [E,N,K] along K, each expert's apart, and widen them."""
        operand = self._recipe.weights
        if w.dim() == 2:
            return convert(w, operand).widen(w.dtype)
        experts, rows, _ = w.shape
        # Tiles must not hold rows of two experts.
        missing = -rows % operand.block if operand.is_tiled else 0
        padded = torch.nn.functional.pad(w, (0, 0, 0, missing))
        flat = padded.flatten(0, 1)
        ends = torch.arange(1, experts + 1, device=w.device) * (rows + missing)
        converted = convert(flat, operand, Groups(ends=ends)).widen(w.dtype)
        return converted.unflatten(0, (experts, rows + missing))[:, :rows]
