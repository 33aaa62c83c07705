"""Products of converted operands by torch's scaled products.

torch multiplies numbers with a scale a tensor on a CPU too; of the other kinds its own shape
functions check layouts here, and scales are read back by the definition of each layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels import scaled_products
from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.kernels.low_precision import NarrowTensor, convert, decode_scales
from moewright.engine.kernels.products import NarrowProducts
from moewright.engine.kernels.scale_tiles import tile_scales
from moewright.engine.kernels.scaled_products import (
    ScaledProduct,
    block_scales,
    find_product,
    fits,
    multiply,
    multiply_scaled,
    products_of_device,
)
from moewright.engine.observe.flop_counter import FlopCounter
from moewright.rules.delayed_scaling import ScaledLinear
from moewright.rules.low_precision import NarrowFormat, Recipe, find_recipe
from moewright.spec.ledger import Module
from moewright.spec.workload import DelayedScalingSpec, Dtype, TensorScaling, Workload

ROWS, COLUMNS, OUT = 256, 384, 256
FP32_EPS, BF16_EPS = 2.0**-24, 2.0**-8


def recipe_of(precision: Dtype, scaling: TensorScaling = TensorScaling.CURRENT) -> Recipe:
    recipe = find_recipe(
        Workload(seq_len=8, global_batch=1, precision=precision, tensor_scaling=scaling)
    )
    assert recipe is not None
    return recipe


RECIPES = {
    ScaledProduct.TENSOR: recipe_of(Dtype.FP8),
    ScaledProduct.BLOCKS_128: recipe_of(Dtype.FP8, TensorScaling.BLOCKWISE),
    ScaledProduct.MXFP8: recipe_of(Dtype.MXFP8),
    ScaledProduct.NVFP4: recipe_of(Dtype.NVFP4),
}
DENSE = tuple(RECIPES)


def draw(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    return torch.randn(rows, columns, generator=generator) * spread


def on_meta(narrow: NarrowTensor) -> NarrowTensor:
    """Return the operand without its data, as torch's shape functions take it for one of a GPU."""
    scales = None if narrow.scales is None else narrow.scales.to("meta")
    group_scales = None if narrow.group_scales is None else narrow.group_scales.to("meta")
    return replace(narrow, codes=narrow.codes.to("meta"), scales=scales, group_scales=group_scales)


def convert_both(product: ScaledProduct) -> tuple[NarrowTensor, NarrowTensor]:
    recipe = RECIPES[product]
    return (
        convert(draw(ROWS, COLUMNS, 1), recipe.inputs),
        convert(draw(OUT, COLUMNS, 2), recipe.weights),
    )


def assert_sums_alike(
    result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rounding: float = 0.0
) -> None:
    """Hold a b^T against fp64: sums of K products in any order, and so much of each product."""
    exact = a.double() @ b.double().T
    terms = a.double().abs() @ b.double().abs().T
    bound = terms * (2 * a.shape[1] * FP32_EPS + rounding)
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.fixture
def cpu_has_tensor_products(monkeypatch: pytest.MonkeyPatch) -> None:
    has = frozenset({ScaledProduct.TENSOR})
    monkeypatch.setattr(scaled_products, "_products_of", lambda device: has)


@pytest.mark.parametrize("number", [NarrowFormat.E4M3, NarrowFormat.E5M2])
def test_torchs_product_on_a_cpu_is_that_of_the_numbers(number: NarrowFormat) -> None:
    inputs = replace(RECIPES[ScaledProduct.TENSOR].inputs, number=number)
    a, b = convert(draw(48, 64, 1), inputs), convert(draw(32, 64, 2), RECIPES[DENSE[0]].weights)
    result = multiply_scaled(ScaledProduct.TENSOR, a, b, torch.float32)
    assert_sums_alike(result, a.widen(torch.float32), b.widen(torch.float32), 2 * FP32_EPS)
    assert_sums_alike(multiply(a, b, torch.float32), a.widen(torch.float32), b.widen(torch.float32))


def test_in_bf16_emulation_rounds_operands_and_torch_the_result_alone() -> None:
    a, b = convert_both(ScaledProduct.TENSOR)
    wide = a.widen(torch.float32), b.widen(torch.float32)
    scaled = multiply_scaled(ScaledProduct.TENSOR, a, b, torch.bfloat16)
    assert scaled.dtype is torch.bfloat16
    assert_sums_alike(scaled, *wide, rounding=BF16_EPS / 2)
    assert_sums_alike(multiply(a, b, torch.bfloat16), *wide, rounding=1.5 * BF16_EPS)


def run_products(recipe: Recipe, *, is_delayed: bool) -> list[torch.Tensor]:
    x, g, w = draw(ROWS, COLUMNS, 1), draw(ROWS, OUT, 2), draw(OUT, COLUMNS, 3)
    if is_delayed:
        linear = ScaledLinear(name="w", module=Module.DENSE_MLP, experts=1, owned=(0,))
        spec = DelayedScalingSpec()
        scaling = DelayedScaling(spec, recipe, [linear], torch.device("cpu"), lambda: True)
        products = scaling.products_of("w")
    else:
        products = NarrowProducts(recipe, torch.device("cpu"), seed=1)
    return [products.forward(x, w), products.input_grad(g, w), products.weight_grad(g, x)]


@pytest.mark.parametrize("is_delayed", [False, True])
def test_the_three_products_of_a_linear_run_as_scaled_products(
    is_delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[ScaledProduct.TENSOR]
    expected = run_products(recipe, is_delayed=is_delayed)
    has = frozenset({ScaledProduct.TENSOR})
    monkeypatch.setattr(scaled_products, "_products_of", lambda device: has)
    calls = []
    scaled_mm = F.scaled_mm

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_mm", record)
    results = run_products(recipe, is_delayed=is_delayed)
    assert len(calls) == 3
    for result, wide in zip(results, expected, strict=True):
        assert float((result - wide).norm()) <= 1e-6 * float(wide.norm())


def test_experts_and_other_shapes_are_multiplied_wide(cpu_has_tensor_products: None) -> None:
    recipe = RECIPES[ScaledProduct.TENSOR]
    products = NarrowProducts(recipe, torch.device("cpu"), seed=1)
    x, w = draw(20, 24, 1), draw(10, 24, 2)  # K and N are no sixteens
    assert_sums_alike(
        products.forward(x, w),
        convert(x, recipe.inputs).widen(torch.float32),
        convert(w, recipe.weights).widen(torch.float32),
    )
    ends = torch.tensor([5, 20], dtype=torch.int32)
    experts = torch.stack([w, 2 * w])
    apart = [products.forward(part, e) for part, e in zip(x.split((5, 15)), experts, strict=True)]
    together = products.forward(x, experts, ends)
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", DENSE)
def test_torch_takes_the_layouts_of_a_gpu(product: ScaledProduct) -> None:
    a, b = map(on_meta, convert_both(product))
    assert fits(product, a, b, torch.bfloat16)
    result = multiply_scaled(product, a, b, torch.bfloat16)
    assert (result.shape, result.dtype, result.device.type) == ((ROWS, OUT), torch.bfloat16, "meta")


def test_torch_takes_both_operands_of_a_weight_gradient_in_rows_of_128() -> None:
    operand = RECIPES[ScaledProduct.BLOCKS_128].inputs
    a, b = (on_meta(convert(draw(ROWS, width, 1).mT, operand)) for width in (OUT, COLUMNS))
    assert multiply_scaled(ScaledProduct.BLOCKS_128, a, b, torch.bfloat16).shape == (OUT, COLUMNS)


@pytest.mark.parametrize("product", DENSE[1:])
def test_torch_refuses_scales_in_another_order(
    product: ScaledProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = map(on_meta, convert_both(product))
    scales_of = scaled_products._scales_of
    monkeypatch.setattr(
        scaled_products, "_scales_of", lambda *args: [s[:-1] for s in scales_of(*args)[:1]]
    )
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        multiply_scaled(product, a, b, torch.bfloat16)


@pytest.mark.parametrize("product", DENSE)
def test_what_torch_would_refuse_does_not_fit(product: ScaledProduct) -> None:
    a, b = map(on_meta, convert_both(product))
    recipe = RECIPES[product]
    few_rows = on_meta(convert(draw(OUT - 8, COLUMNS, 2), recipe.weights))
    assert not fits(product, a, few_rows, torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError)):
        multiply_scaled(product, a, few_rows, torch.bfloat16)
    short_a, short_b = (
        on_meta(convert(draw(rows, COLUMNS - 8, 1), recipe.inputs)) for rows in (ROWS, OUT)
    )
    assert not fits(product, short_a, short_b, torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError)):
        multiply_scaled(product, short_a, short_b, torch.bfloat16)
    twice = replace(a, operand=replace(a.operand, number=NarrowFormat.E5M2))
    assert not fits(product, twice, replace(b, operand=twice.operand), torch.bfloat16)
    assert not fits(product, replace(a, codes=a.codes[:0]), b, torch.bfloat16)


def test_tiles_of_scales_are_those_of_the_cublas_manual() -> None:
    rows, blocks = 300, 10
    scales = torch.randint(1, 200, (rows, blocks), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tiles = tile_scales(scales).view(torch.uint8)
    assert tiles.shape == (3 * 128 * 3 * 4,)
    expected = torch.zeros_like(tiles)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * 3 + block // 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            expected[tile * 512 + inside] = scales.view(torch.uint8)[row, block]
    assert torch.equal(tiles, expected)


def test_scales_of_blocks_decode_the_same_numbers() -> None:
    a, b = convert_both(ScaledProduct.BLOCKS_128)
    (scales_a,) = scaled_products._scales_of(ScaledProduct.BLOCKS_128, a)
    (scales_b,) = scaled_products._scales_of(ScaledProduct.BLOCKS_128, b)
    blocks = COLUMNS // 128
    wide_a = a.codes.float().unflatten(1, (blocks, 128)) * scales_a[:, :, None]
    assert torch.equal(wide_a.flatten(1), a.widen(torch.float32))
    assert scales_b.shape == (4, OUT // 128)  # three blocks, filled up to four
    tiles = b.codes.float().view(OUT // 128, 128, blocks, 128)
    wide_b = tiles * scales_b[:blocks].T[:, None, :, None]
    assert torch.equal(wide_b.view(OUT, COLUMNS), b.widen(torch.float32))


def test_a_power_of_two_for_128_is_four_of_mxfp8s(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[ScaledProduct.BLOCKS_128]
    # From the least scale on: 2^-127, which fp32 has without a hidden bit.
    exponents = torch.linspace(-132, 100, ROWS)[:, None]
    wide = draw(ROWS, COLUMNS, 1).sign() * torch.exp2(exponents)
    for operand in (recipe.inputs, recipe.weights):
        narrow = convert(wide, operand)
        assert narrow.scales is not None
        fours = decode_scales(block_scales(narrow), RECIPES[ScaledProduct.MXFP8].inputs.scale)
        assert torch.equal(fours, narrow.scales.repeat_interleave(4, 1))
    assert float(convert(wide, recipe.inputs).scales.amin()) == 2.0**-127  # type: ignore[union-attr]
    a, b = convert_both(ScaledProduct.BLOCKS_128)
    has = {ScaledProduct.MXFP8}
    monkeypatch.setattr(scaled_products, "_products_of", lambda device: has)
    assert find_product(a, b, torch.bfloat16) is ScaledProduct.MXFP8
    result = multiply_scaled(ScaledProduct.MXFP8, on_meta(a), on_meta(b), torch.bfloat16)
    assert result.shape == (ROWS, OUT)
    has.add(ScaledProduct.BLOCKS_128)
    assert find_product(a, b, torch.bfloat16) is ScaledProduct.BLOCKS_128


WITH_MSLK = "CXX_FLAGS= -DUSE_KINETO -DUSE_MSLK -O2"


@pytest.mark.parametrize(
    ("capability", "cuda", "build", "products"),
    [
        ((8, 0), (12, 9), WITH_MSLK, ""),
        ((8, 9), (12, 9), WITH_MSLK, "tensor"),
        ((9, 0), (12, 8), WITH_MSLK, "tensor expert_rows"),
        ((9, 0), (12, 9), WITH_MSLK, "tensor expert_rows blocks_128"),
        ((10, 0), (13, 0), WITH_MSLK, "tensor mxfp8 nvfp4 expert_mxfp8 expert_nvfp4"),
        ((10, 0), (13, 0), "CXX_FLAGS= -O2", "tensor mxfp8 nvfp4"),
        ((10, 3), (13, 0), WITH_MSLK, "tensor mxfp8 nvfp4"),
        ((10, 0), (12, 6), WITH_MSLK, "tensor"),
        ((12, 0), (13, 0), WITH_MSLK, "tensor"),
    ],
)
def test_devices_have_what_capability_cuda_and_build_give(
    capability: tuple[int, int], cuda: tuple[int, int], build: str, products: str
) -> None:
    assert products_of_device(capability, cuda, build) == set(products.split())


def test_a_device_is_asked_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda of: (9, 0) if of == device else (8, 0)
    )
    assert scaled_products.has_product(ScaledProduct.EXPERT_ROWS, device)
    assert not scaled_products.has_product(ScaledProduct.EXPERT_MXFP8, device)
    assert not scaled_products.has_product(ScaledProduct.TENSOR, torch.device("cpu"))
    scaled_products._products_of.cache_clear()


@pytest.mark.parametrize("product", DENSE)
def test_their_flops_are_counted(product: ScaledProduct) -> None:
    counted: list[int] = []
    counter = FlopCounter(lambda op, flops: counted.append(flops))
    codes = [scaled_products.codes_of(operand) for operand in convert_both(product)]
    func = torch.ops.aten._scaled_mm_v2.default
    counter.count(func, (codes[0], codes[1].mT), {})
    assert counted == [2 * ROWS * COLUMNS * OUT]
