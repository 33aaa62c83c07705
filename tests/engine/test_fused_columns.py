"""The kernels of backward's conversions write the bits of the reference, and read tensors once.

They run on a GPU where there is one, else in Triton's interpreter on the CPU (conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_fused_convert import DEVICE, RECIPES, assert_same_bits, draw, recipe_of

from moewright.engine.kernels import columns
from moewright.engine.kernels.columns import ColumnForm, NarrowGradient, NarrowInput
from moewright.engine.kernels.fused.table import triton_kernels
from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    GroupPadding,
    Groups,
    NarrowTensor,
    convert,
    decode_numbers,
    pad_groups,
)
from moewright.engine.kernels.products import Conversions, Gradient, NarrowProducts
from moewright.rules.low_precision import OperandKind

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)

BLOCKED = ("blockwise", "mxfp8")
SHAPES = ((70, 200), (3, 31), (130, 33))


def spread_experts(rows: int, multiple: int, device: torch.device) -> GroupPadding:
    """Spread the rows of four experts, the second of which has none."""
    ends = torch.tensor([rows // 3, rows // 3, rows // 2, rows], dtype=torch.int32, device=device)
    return pad_groups(ends, rows, multiple)


def list_forms(name: str, rows: int, device: torch.device) -> list[ColumnForm]:
    """List the forms of a recipe: dense and of experts, of kept inputs and of others."""
    recipe = recipe_of(name)
    multiple = max(recipe.inputs.block, recipe.hadamard_rows)
    return [
        ColumnForm(
            operand=operand,
            kept=kept,
            padding=spread_experts(rows, multiple, device) if is_spread else None,
            hadamard_rows=recipe.hadamard_rows,
        )
        for operand, kept, is_spread in product(
            (recipe.inputs, recipe.gradients),
            (None, recipe.inputs) if name in BLOCKED else (None,),
            (False, True),
        )
    ]


@pytest.mark.parametrize("name", [*BLOCKED, "nvfp4"])
def test_columns_have_the_bits_of_the_reference(name: str) -> None:
    kernels = triton_kernels()
    for shape in SHAPES:
        x = draw(*shape).to(torch.float32 if shape == SHAPES[0] else torch.bfloat16)
        forms = list_forms(name, len(x), DEVICE), list_forms(name, len(x), torch.device("cpu"))
        for ours, reference in zip(*forms, strict=True):
            result = kernels.convert_columns(x.to(DEVICE), ours, None)
            expected = columns.convert_columns(x, reference)
            assert_same_bits(result, expected)
            assert result.groups.of_columns == expected.groups.of_columns


@pytest.mark.parametrize("name", BLOCKED)
def test_what_was_kept_of_an_input_is_turned_to_the_bits_of_the_input(name: str) -> None:
    """Dense and of experts, of rows and columns that fill no tile."""
    kernels = triton_kernels()
    operand = recipe_of(name).inputs
    for shape in (*SHAPES, (0, 64)):
        x = draw(*shape) if shape[0] else torch.zeros(shape).bfloat16()
        x = x.float() if shape == SHAPES[0] else x
        rows = kernels.convert(x.to(DEVICE), operand, ONE_GROUP, None)
        kept = NarrowInput(dtype=x.dtype, rows=rows)
        for is_spread in (False, True) if shape[0] else (False,):
            forms = [ColumnForm(operand=operand) for _ in range(2)]
            if is_spread:
                forms = [
                    replace(form, padding=spread_experts(len(x), operand.block, device))
                    for form, device in zip(forms, (DEVICE, torch.device("cpu")), strict=True)
                ]
            result = kernels.convert_columns(kept, forms[0], None)
            expected = columns.convert_columns(x, replace(forms[1], kept=operand))
            assert_same_bits(result, expected)


@pytest.mark.parametrize("name", BLOCKED)
def test_a_gradient_is_written_both_ways_in_the_bits_of_two_conversions(name: str) -> None:
    """A transposed view and a slice of columns too."""
    gradients = recipe_of(name).gradients
    for shape in SHAPES:
        views = draw(*shape[::-1]).mT, draw(shape[0], 2 * shape[1])[:, ::2]
        for g, is_spread in zip(views, (False, True), strict=True):
            forms = [ColumnForm(operand=gradients) for _ in range(2)]
            if is_spread:
                forms = [
                    replace(form, padding=spread_experts(len(g), gradients.block, device))
                    for form, device in zip(forms, (DEVICE, torch.device("cpu")), strict=True)
                ]
            both = triton_kernels().convert_gradient(g.to(DEVICE), forms[0])
            assert both is not None
            assert both.columns is not None
            assert_same_bits(both.rows, convert(g, gradients))
            assert_same_bits(both.columns, columns.convert_columns(g, forms[1]))


@pytest.mark.parametrize("name", list(RECIPES))
def test_numbers_are_widened_to_the_bits_of_the_reference(name: str) -> None:
    """Of groups with scales of their own, transposed, odd, subnormal, of zeros."""
    recipe = recipe_of(name)
    fused = triton_kernels().convert
    ends = torch.tensor([0, 20, 70], dtype=torch.int32, device=DEVICE)
    for kind, groups in product(OperandKind, (ONE_GROUP, Groups(ends=ends))):
        operand = recipe.operand(kind)
        for x in (draw(70, 201), draw(70, 33) * 2.0**-110):
            narrow = fused(x.to(DEVICE), operand, ONE_GROUP if operand.is_tiled else groups, None)
            assert narrow.decode is not decode_numbers
            assert_widened(narrow)
            if not operand.block and groups is ONE_GROUP:
                assert_widened(narrow.transpose())


def assert_widened(narrow: NarrowTensor) -> None:
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        ours, reference = narrow.widen(dtype), decode_numbers(narrow, dtype)
        assert torch.equal(ours.view(bits), reference.contiguous().view(bits))


def test_codes_of_no_number_stay_so() -> None:
    for name, kind in (("mxfp8", OperandKind.INPUT), ("current", OperandKind.GRADIENT)):
        x = draw(40, 95)
        x[7, 11] = torch.nan
        narrow = triton_kernels().convert(
            x.to(DEVICE), recipe_of(name).operand(kind), ONE_GROUP, None
        )
        assert bool(narrow.widen(torch.bfloat16)[7, 11].isnan())


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("name", list(RECIPES))
def test_backward_is_the_same_with_each_implementation(name: str, is_grouped: bool) -> None:
    """By a gradient that both products read, and by one that each converts."""
    recipe = recipe_of(name)
    kernels = triton_kernels()
    fused = Conversions(
        convert=kernels.convert,
        convert_weight=kernels.convert_weight,
        convert_columns=kernels.convert_columns,
        convert_gradient=kernels.convert_gradient,
    )
    x, g = draw(70, 48).to(DEVICE), draw(70, 64).to(DEVICE)
    ends = None
    w = draw(4 * 64, 48).view(4, 64, 48).to(DEVICE)
    if is_grouped:
        ends = torch.tensor([20, 20, 31, 70], dtype=torch.int32, device=DEVICE)
    else:
        w = w[0]
    results = []
    for conversions, is_shared in product((Conversions(), fused), (False, True)):
        products = NarrowProducts(recipe, DEVICE, seed=1, conversions=conversions)
        gradient: Gradient = g
        if is_shared:
            gradient = products.begin_backward(g, x, ends)
            is_once = name == "current" or (conversions is fused and name in BLOCKED)
            assert isinstance(gradient, NarrowGradient) == is_once
        results.append(
            (products.input_grad(gradient, w, ends), products.weight_grad(gradient, x, ends))
        )
    for grad_x, grad_w in results[1:]:
        assert torch.equal(grad_x, results[0][0])
        assert torch.equal(grad_w, results[0][1])


def test_the_products_of_a_job_convert_by_its_kernels() -> None:
    """Each operand once, but for an input: as it is kept, and along the rows."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str, by: object) -> object:
        def call(*args: torch.Tensor) -> object:
            seen.append((name, tuple(args[0].shape)))
            return by(*args)  # type: ignore[operator]

        return call

    kernels = triton_kernels()
    names = ("convert", "convert_weight", "convert_columns", "convert_gradient")
    noted = {name: note(name, getattr(kernels, name)) for name in names}
    products = NarrowProducts(recipe_of("mxfp8"), DEVICE, 1, Conversions(**noted))  # type: ignore[arg-type]
    x, w, g = (torch.ones(*shape, device=DEVICE) for shape in ((32, 64), (96, 64), (32, 96)))
    products.forward(x, w)
    gradient = products.begin_backward(g, x)
    products.input_grad(gradient, w)
    products.weight_grad(gradient, x)
    assert seen == [
        ("convert", (32, 64)),
        ("convert", (96, 64)),
        ("convert_gradient", (32, 96)),
        ("convert", (64, 96)),  # the weight, where no step keeps its copies
        ("convert_columns", (32, 64)),
    ]
