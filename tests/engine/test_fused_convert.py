"""The kernel that converts to 8 and 4 bits writes the bits of the reference, on every device.

It runs on a GPU where there is one, else in Triton's interpreter on the CPU (conftest.py).
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from moewright.engine.kernels.fused.table import triton_kernels
from moewright.engine.kernels.low_precision import (
    ONE_GROUP,
    Groups,
    NarrowTensor,
    convert,
    convert_weight,
)
from moewright.engine.run.env import is_triton_interpreted
from moewright.rules.low_precision import OperandKind, Recipe, find_recipe
from moewright.spec.workload import Dtype, TensorScaling, Workload

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)

DEVICE = torch.device("cpu" if is_triton_interpreted() else "cuda")
RECIPES = {
    "current": (Dtype.FP8, TensorScaling.CURRENT),
    "blockwise": (Dtype.FP8, TensorScaling.BLOCKWISE),
    "mxfp8": (Dtype.MXFP8, TensorScaling.CURRENT),
    "nvfp4": (Dtype.NVFP4, TensorScaling.CURRENT),
}
# Broken blocks, a column more than pairs, more rows and columns than a tile.
SHAPES = ((70, 200), (3, 31), (130, 33))


def recipe_of(name: str) -> Recipe:
    precision, scaling = RECIPES[name]
    recipe = find_recipe(
        Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
    )
    assert recipe is not None
    return recipe


def draw(rows: int, columns: int) -> torch.Tensor:
    """Draw rows of very different sizes, one of them zeros: ties, subnormals, largest numbers."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.exp(4 * torch.randn(rows, 1, generator=generator))
    x = (sizes * torch.randn(rows, columns, generator=generator)).bfloat16()
    x[1] = 0
    x[2, : columns // 2] = torch.arange(columns // 2) / 4
    return x


def assert_same_bits(result: NarrowTensor, expected: NarrowTensor) -> None:
    assert result.columns == expected.columns
    for ours, reference in zip(result.tensors, expected.tensors, strict=True):
        assert (ours.dtype, ours.shape) == (reference.dtype, reference.shape)
        assert torch.equal(
            ours.cpu().contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_operand_has_the_bits_of_the_reference(name: str) -> None:
    """Tensors as they are and transposed, with scales of their own for groups of lines."""
    fused = triton_kernels().convert
    recipe = recipe_of(name)
    for shape, is_transposed, kind in product(SHAPES, (False, True), OperandKind):
        operand = recipe.operand(kind)
        x = draw(*shape)
        x = x.mT if is_transposed else x
        rows, columns = x.shape
        groupings = [ONE_GROUP]
        if not operand.is_tiled:
            ends = torch.tensor([0, rows // 3, rows // 2], dtype=torch.int32)  # the first is empty
            groupings.append(Groups(ends=ends))
            blocks = -(-columns // max(operand.block, 1))
            ends = max(operand.block, 1) * torch.tensor([blocks // 2, blocks], dtype=torch.int32)
            groupings.append(Groups(ends=ends, of_columns=True))
        for groups in groupings:
            there = groups
            if groups.ends is not None:
                there = Groups(ends=groups.ends.to(DEVICE), of_columns=groups.of_columns)
            assert_same_bits(fused(x.to(DEVICE), operand, there, None), convert(x, operand, groups))


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_weight_is_written_both_ways_in_the_bits_of_two_conversions(name: str) -> None:
    """Broken tiles, odd rows and columns, experts whose tiles are filled up, a view of a buffer."""
    operand = recipe_of(name).weights
    for shape in ((70, 200), (3, 31), (130, 33), (3, 20, 70), (2, 130, 5)):
        flat = draw(prod(shape[:-1]), shape[-1])
        w = torch.cat((flat.new_ones(7), flat.flatten()))[7:].view(shape)
        fused = triton_kernels().convert_weight(w.to(DEVICE), operand)
        expected = convert_weight(w, operand)
        for ours, reference in (
            (fused.forward, expected.forward),
            (fused.transposed, expected.transposed),
        ):
            assert_same_bits(ours, reference)
            ends = ours.groups.ends, reference.groups.ends
            assert (ends[0] is None) == (ends[1] is None)
            assert ends[0] is None or ends[0].tolist() == ends[1].tolist()


def test_numbers_are_rounded_at_random_by_the_same_draws() -> None:
    operand = recipe_of("nvfp4").gradients
    x = draw(40, 95).to(DEVICE)
    results = [
        by(x, operand, ONE_GROUP, torch.Generator(DEVICE).manual_seed(3))
        for by in (triton_kernels().convert, convert)
    ]
    assert torch.equal(results[0].codes, results[1].codes)


@pytest.mark.parametrize("name", ["current", "blockwise", "mxfp8"])
def test_a_number_that_is_none_stays_so(name: str) -> None:
    x = draw(40, 95).to(DEVICE)
    x[7, 11] = torch.nan
    converted = triton_kernels().convert(x, recipe_of(name).inputs, ONE_GROUP, None)
    assert bool(converted.codes[7, 11].isnan())
