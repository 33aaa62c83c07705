"""Kernels write scales in the order of tensor cores, which no second pass then makes.

The kernels run on a GPU where there is one, else in Triton's interpreter on the CPU (conftest.py);
the device is said to have all products that torch has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels import columns, low_precision, scaled_products
from moewright.engine.kernels.columns import ColumnForm, NarrowInput
from moewright.engine.kernels.fused.table import triton_kernels
from moewright.engine.kernels.low_precision import ONE_GROUP, Groups, NarrowTensor, decode_numbers
from moewright.engine.kernels.products import Conversions, NarrowProducts
from moewright.engine.kernels.scale_tiles import tile_scales, untile_scales
from moewright.engine.kernels.scaled_products import ScaledProduct
from moewright.engine.run.env import is_triton_interpreted
from moewright.rules.low_precision import OperandKind, Recipe, find_recipe
from moewright.spec.workload import Dtype, Workload

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)

DEVICE = torch.device("cpu" if is_triton_interpreted() else "cuda")
PRECISIONS = (Dtype.MXFP8, Dtype.NVFP4)


@pytest.fixture(autouse=True)
def _device_has_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    has = frozenset(ScaledProduct)
    monkeypatch.setattr(scaled_products, "_products_of", lambda device: has)


def recipe_of(precision: Dtype) -> Recipe:
    recipe = find_recipe(Workload(seq_len=1, global_batch=1, precision=precision))
    assert recipe is not None
    return recipe


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(4 * torch.randn(*shape[:-1], 1, generator=generator))
    return (sizes * torch.randn(*shape, generator=generator)).bfloat16().to(DEVICE)


def assert_in_tiles(ours: NarrowTensor, reference: NarrowTensor) -> None:
    """Assert that it is the reference to the bit, with scales in tiles, and is read back so."""
    assert ours.in_tiles
    assert not reference.in_tiles
    assert ours.scales is not None
    assert reference.scales is not None
    assert torch.equal(ours.codes.view(torch.uint8), reference.codes.view(torch.uint8))
    assert ours.scales.shape == reference.scales.shape
    tiles = tile_scales(reference.scales).view(torch.uint8)
    assert torch.equal(ours.scales.view(torch.uint8).flatten(), tiles)
    assert torch.equal(
        untile_scales(ours.scales).view(torch.uint8), reference.scales.view(torch.uint8)
    )
    for dtype in (torch.bfloat16, torch.float32):
        wide = reference.widen(dtype)
        assert torch.equal(ours.widen(dtype), wide)
        assert torch.equal(replace(ours, decode=decode_numbers).widen(dtype), wide)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(128, 128), (256, 128)])
def test_operands_of_whole_tiles_have_their_scales_in_tiles(
    precision: Dtype, shape: tuple[int, int]
) -> None:
    recipe = recipe_of(precision)
    for kind in OperandKind:
        for x in (draw(*shape), draw(*reversed(shape)).mT):
            operand = recipe.operand(kind)
            ours = triton_kernels().convert(x, operand, ONE_GROUP, None)
            assert_in_tiles(ours, low_precision.convert(x, operand))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_broken_tiles_and_rows_of_experts_have_their_scales_row_after_row(precision: Dtype) -> None:
    operand = recipe_of(precision).inputs
    ends = torch.tensor([0, 100, 128], dtype=torch.int32, device=DEVICE)
    rows_of_experts = Groups(ends=ends)
    for shape, groups in (
        ((130, 128), ONE_GROUP),
        ((128, 96), ONE_GROUP),
        ((128, 128), rows_of_experts),
    ):
        narrow = triton_kernels().convert(draw(*shape), operand, groups, None)
        expected = low_precision.convert(draw(*shape), operand, groups)
        assert not narrow.in_tiles
        assert torch.equal(narrow.widen(torch.float32), expected.widen(torch.float32))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(128, 128), (2, 128, 256)])
def test_both_copies_of_a_weight_have_their_scales_in_tiles(
    precision: Dtype, shape: tuple[int, ...]
) -> None:
    operand = recipe_of(precision).weights
    ours = triton_kernels().convert_weight(draw(*shape), operand)
    expected = low_precision.convert_weight(draw(*shape), operand)
    assert_in_tiles(ours.forward, expected.forward)
    assert_in_tiles(ours.transposed, expected.transposed)


def test_what_backward_converts_has_its_scales_in_tiles() -> None:
    """A gradient both ways, and an input that was kept in tiles along its rows."""
    kernels = triton_kernels()
    recipe = recipe_of(Dtype.MXFP8)
    form = ColumnForm(operand=recipe.gradients)
    g = draw(128, 128)
    ours = kernels.convert_gradient(g, form)
    assert ours is not None
    assert ours.columns is not None
    assert_in_tiles(ours.rows, low_precision.convert(g, recipe.gradients))
    assert_in_tiles(ours.columns, columns.convert_columns(g, form))
    kept = kernels.convert(g, recipe.inputs, ONE_GROUP, None)
    narrow = NarrowInput(dtype=g.dtype, rows=kept)
    form = ColumnForm(operand=recipe.inputs)
    assert_in_tiles(
        kernels.convert_columns(narrow, form, None), columns.convert_columns(narrow, form)
    )


def record_operands(
    conversions: Conversions, precision: Dtype, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Return all tensors that the products of a linear and of experts hand to torch's products."""
    operands: list[torch.Tensor] = []

    def record(
        shape: Callable[..., Sequence[int]],
        a: torch.Tensor,
        b: torch.Tensor,
        *scales: Any,
        **more: Any,
    ) -> torch.Tensor:
        operands.extend((a, b, *scales[0], *scales[2]))
        return torch.zeros(shape(a, b, more.get("offs")), dtype=torch.bfloat16, device=DEVICE)

    def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Sequence[int]:
        return (len(a), b.shape[2]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])

    monkeypatch.setattr(F, "scaled_mm", partial(record, lambda a, b, offs: (len(a), b.shape[1])))
    monkeypatch.setattr(F, "scaled_grouped_mm", partial(record, grouped_shape))
    products = NarrowProducts(recipe_of(precision), DEVICE, seed=1, conversions=conversions)
    x, g = draw(128, 128), draw(128, 128, seed=2)
    ends = torch.tensor([100, 128], dtype=torch.int32, device=DEVICE)
    for w, rows in ((draw(128, 128, seed=3), None), (draw(2, 128, 128, seed=4), ends)):
        products.forward(x, w, rows)
        gradient = products.begin_backward(g, x, rows)
        products.input_grad(gradient, w, rows)
        products.weight_grad(gradient, x, rows)
    return operands


@pytest.mark.parametrize("precision", PRECISIONS)
def test_torchs_products_get_the_same_operands_as_from_a_second_pass(
    precision: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = triton_kernels()
    fused = Conversions(
        convert=kernels.convert,
        convert_weight=kernels.convert_weight,
        convert_columns=kernels.convert_columns,
        convert_gradient=kernels.convert_gradient,
    )
    ours = record_operands(fused, precision, monkeypatch)
    expected = record_operands(Conversions(), precision, monkeypatch)
    assert len(ours) == len(expected) > 0
    for tensor, reference in zip(ours, expected, strict=True):
        assert tensor.shape == reference.shape
        # torch copies no pairs of 4 bits, and views no number without dims.
        if tensor.element_size() == 1:
            tensor, reference = tensor.view(torch.uint8), reference.view(torch.uint8)
        assert torch.equal(tensor, reference)
