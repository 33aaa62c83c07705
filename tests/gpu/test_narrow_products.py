"""Scaled products of a GPU against the same converted numbers in fp64.

The tests are skipped without a device, and each of them where the device lacks the product.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewright.engine.kernels.fused.table import triton_kernels
from moewright.engine.kernels.low_precision import ONE_GROUP, Groups, convert, convert_weight
from moewright.engine.kernels.products import NarrowProducts
from moewright.engine.kernels.scaled_groups import find_gradient_product, find_group_product
from moewright.engine.kernels.scaled_products import find_product, multiply
from moewright.rules.low_precision import NarrowFormat, Recipe, find_recipe
from moewright.spec.workload import Dtype, Fp8Format, TensorScaling, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, COLUMNS, OUT = 512, 1024, 768
# The result is rounded to bf16 once; tensor cores keep at least 13 bits of a sum of fp8 products.
TOLERANCE = 2.0**-8

RECIPES = {
    "current": (Dtype.FP8, TensorScaling.CURRENT),
    "current_e4m3": (Dtype.FP8, TensorScaling.CURRENT),
    "blockwise": (Dtype.FP8, TensorScaling.BLOCKWISE),
    "mxfp8": (Dtype.MXFP8, TensorScaling.CURRENT),
    "nvfp4": (Dtype.NVFP4, TensorScaling.CURRENT),
}


def recipe_of(name: str) -> Recipe:
    precision, scaling = RECIPES[name]
    workload = Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
    fp8_format = Fp8Format.E4M3 if name.endswith("e4m3") else Fp8Format.HYBRID
    recipe = find_recipe(replace(workload, fp8_format=fp8_format))
    assert recipe is not None
    return recipe


def draw(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16().cuda()


def assert_close(result: torch.Tensor, exact: torch.Tensor) -> None:
    error = (result.double() - exact).norm()
    assert float(error) <= TOLERANCE * float(exact.norm())


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_dense_product_is_that_of_its_numbers(name: str) -> None:
    recipe = recipe_of(name)
    a = convert(draw(ROWS, COLUMNS, 1), recipe.inputs)
    b = convert(draw(OUT, COLUMNS, 2), recipe.weights)
    if find_product(a, b, torch.bfloat16) is None:
        pytest.skip("the device has no such product")
    exact = a.widen(torch.float32).double() @ b.widen(torch.float32).double().T
    assert_close(multiply(a, b, torch.bfloat16), exact)


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_products_of_a_linear_are_those_of_a_cpu(name: str) -> None:
    """In fp32 a CPU multiplies the numbers themselves, which are the same."""
    x, g, w = draw(ROWS, COLUMNS, 1), draw(ROWS, OUT, 2), draw(OUT, COLUMNS, 3)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        products = NarrowProducts(recipe_of(name), torch.device(device), seed=1)
        here = [tensor.to(device, dtype) for tensor in (x, g, w)]
        out = [products.forward(here[0], here[2])]
        if name != "nvfp4":  # whose gradients are rounded at random, by draws of a device's own
            out += [products.input_grad(here[1], here[2]), products.weight_grad(here[1], here[0])]
        results.append([tensor.double().cpu() for tensor in out])
    for reference, result in zip(*results, strict=True):
        assert_close(result, reference)


# The second expert has no rows, and the first fewer than a tile of scales.
SIZES = (16, 0, 184, 312)
EXPERTS = len(SIZES)


def products_of_experts(name: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the three products of a linear of experts, without numbers rounded at random."""
    recipe = recipe_of(name)
    recipe = replace(recipe, gradients=replace(recipe.gradients, rounds_at_random=False))
    products = NarrowProducts(recipe, torch.device(device), seed=1)
    ends = torch.tensor(SIZES, device=device).cumsum(0).int()
    x, g = (draw(ROWS, width, seed).to(device, dtype) for seed, width in ((1, COLUMNS), (2, OUT)))
    w = draw(EXPERTS * OUT, COLUMNS, 3).view(EXPERTS, OUT, COLUMNS).to(device, dtype)
    return [
        products.forward(x, w, ends),
        products.input_grad(g, w, ends),
        products.weight_grad(g, x, ends),
    ]


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_products_of_experts_are_those_of_a_cpu(name: str) -> None:
    references = products_of_experts(name, "cpu", torch.float32)
    results = products_of_experts(name, "cuda", torch.bfloat16)
    for result, reference in zip(results, references, strict=True):
        assert_close(result.cpu(), reference.double())
    assert not bool(results[2][SIZES.index(0)].any())


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_rows_of_experts_are_multiplied_by_torch(name: str) -> None:
    """Where the device has a product, forward and the weight's gradient take it."""
    recipe = recipe_of(name)
    ends = torch.tensor(SIZES, device="cuda").cumsum(0).int()
    x = draw(ROWS, COLUMNS, 1)
    a = convert(x, recipe.inputs, Groups(ends=ends))
    b = convert(draw(EXPERTS * OUT, COLUMNS, 3), recipe.weights)
    shape = torch.Size((EXPERTS, OUT, COLUMNS))
    if find_group_product(a, b, shape, torch.bfloat16) is None:
        pytest.skip("the device has no such product")
    product = find_gradient_product(recipe.gradients, recipe.inputs, OUT, x)
    assert (product is not None) == (recipe.gradients.number is not NarrowFormat.E5M2)


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_kernel_of_conversions_writes_the_bits_of_a_cpu(name: str) -> None:
    """Along rows and along columns, as both products of a gradient ask for it."""
    pytest.importorskip("triton", reason="needs the package triton")
    fused = triton_kernels().convert
    recipe = recipe_of(name)
    x = draw(ROWS, COLUMNS, 1)
    for operand in (recipe.inputs, recipe.weights, recipe.gradients):
        for tensor in (x, x.mT):
            result = fused(tensor, operand, ONE_GROUP, None)
            expected = convert(tensor.cpu(), operand)
            for ours, reference in zip(result.tensors, expected.tensors, strict=True):
                assert torch.equal(
                    ours.cpu().view(torch.uint8), reference.contiguous().view(torch.uint8)
                )
    both = triton_kernels().convert_weight(x, recipe.weights)
    expected_weight = convert_weight(x.cpu(), recipe.weights)
    for ours, reference in zip(both.tensors(), expected_weight.tensors(), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), reference.contiguous().view(torch.uint8))
