"""Products of experts by torch's scaled grouped products, which no CPU has.

A stand-in of torch's operation reads layouts by their definition and holds them against torch's own
shape function. Its results are those of the emulation, rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels import scaled_products
from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.kernels.low_precision import Groups, convert
from moewright.engine.kernels.products import NarrowProducts, Products
from moewright.engine.kernels.scaled_groups import find_group_product
from moewright.engine.kernels.scaled_products import ScaledProduct
from moewright.engine.observe.flop_counter import FlopCounter
from moewright.engine.observe.module_scopes import ObservingMode
from moewright.rules.delayed_scaling import ScaledLinear
from moewright.rules.low_precision import NarrowFormat, Recipe, find_recipe
from moewright.spec.ledger import Module
from moewright.spec.workload import DelayedScalingSpec, Dtype, Fp8Format, TensorScaling, Workload
from stand_in_grouped_mm import multiply_by_groups

# The third expert has no rows, the last few; neither width is one of whole tiles.
SIZES = (165, 35, 0, 3)
ROWS, COLUMNS, OUT = sum(SIZES), 96, 160
EXPERTS = len(SIZES)
ENDS = torch.tensor(SIZES).cumsum(0).int()
BF16_ROUNDING = 2.0**-8

PRODUCTS = ("forward", "input_grad", "weight_grad")
# Which recipe is multiplied by which product, and in which products of a linear.
CASES = {
    "fp8": (Dtype.FP8, TensorScaling.CURRENT, ScaledProduct.EXPERT_ROWS, PRODUCTS[:1]),
    "fp8 delayed": (Dtype.FP8, TensorScaling.DELAYED, ScaledProduct.EXPERT_ROWS, PRODUCTS[:1]),
    "fp8 e4m3": (Dtype.FP8, TensorScaling.CURRENT, ScaledProduct.EXPERT_ROWS, PRODUCTS),
    "fp8 e4m3 delayed": (Dtype.FP8, TensorScaling.DELAYED, ScaledProduct.EXPERT_ROWS, PRODUCTS),
    "fp8 blocks": (Dtype.FP8, TensorScaling.BLOCKWISE, ScaledProduct.EXPERT_MXFP8, PRODUCTS),
    "mxfp8": (Dtype.MXFP8, TensorScaling.CURRENT, ScaledProduct.EXPERT_MXFP8, PRODUCTS),
    "nvfp4": (Dtype.NVFP4, TensorScaling.CURRENT, ScaledProduct.EXPERT_NVFP4, PRODUCTS),
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe that rounds no number at random."""
    precision, scaling, *_ = CASES[name]
    workload = Workload(seq_len=8, global_batch=1, precision=precision, tensor_scaling=scaling)
    fp8_format = Fp8Format.E4M3 if "e4m3" in name else Fp8Format.HYBRID
    recipe = find_recipe(replace(workload, fp8_format=fp8_format))
    assert recipe is not None
    return replace(recipe, gradients=replace(recipe.gradients, rounds_at_random=False))


def build_products(name: str) -> Products:
    recipe = recipe_of(name)
    if CASES[name][1] is not TensorScaling.DELAYED:
        return NarrowProducts(recipe, torch.device("cpu"), seed=1)
    owned = tuple(range(EXPERTS))
    linear = ScaledLinear(name="w", module=Module.EXPERTS, experts=EXPERTS, owned=owned)
    scaling = DelayedScaling(
        DelayedScalingSpec(), recipe, [linear], torch.device("cpu"), lambda: True
    )
    amaxes = torch.arange(1.0, 3 * EXPERTS + 1).view(EXPERTS, 3)
    scaling.update(amaxes)
    return scaling.products_of("w")


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread).bfloat16()


def calls_of(name: str, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the three products of a linear of experts."""
    products = build_products(name)
    x, g = draw(ROWS, COLUMNS, seed=1).to(dtype), draw(ROWS, OUT, seed=2).to(dtype)
    w = draw(EXPERTS, OUT, COLUMNS, seed=3).to(dtype)
    return {
        "forward": partial(products.forward, x, w, ENDS),
        "input_grad": partial(products.input_grad, g, w, ENDS),
        "weight_grad": partial(products.weight_grad, g, x, ENDS),
    }


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-in in the place of torch's operation, and list what it is called for."""
    calls: list[str] = []

    def multiply(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("rows" if args[1].dim() == 3 else "weight_grad")
        return multiply_by_groups(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_grouped_mm", multiply)
    return calls


def give_device(monkeypatch: pytest.MonkeyPatch, *products: ScaledProduct) -> None:
    monkeypatch.setattr(scaled_products, "_products_of", lambda device: frozenset(products))


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("name", list(CASES))
def test_a_product_of_experts_is_the_emulations(
    name: str, kind: str, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, product, kinds = CASES[name]
    emulated = calls_of(name, torch.float32)[kind]()
    assert not used
    give_device(monkeypatch, product)
    result = calls_of(name, torch.bfloat16)[kind]()
    assert len(used) == (kind in kinds)
    assert result.dtype is torch.bfloat16
    assert result.shape == emulated.shape
    if kind in kinds:
        # One rounding to bf16; fp32 sums of the emulation cancel, and NVFP4's rotation back does.
        error = result.float() - emulated
        bound = BF16_ROUNDING * emulated.abs() + 3e-5 * emulated.abs().amax()
        assert bool((error.abs() <= bound).all())
        assert float(error.norm()) <= BF16_ROUNDING / 2 * float(emulated.norm())
    if kind == "weight_grad":
        assert not bool(result[SIZES.index(0)].any())


@pytest.mark.parametrize("name", ["fp8 e4m3", "mxfp8", "nvfp4"])
def test_flops_are_those_of_the_rows(
    name: str, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_device(monkeypatch, CASES[name][2])
    counted: list[int] = []
    counter = FlopCounter(lambda op, flops: counted.append(flops))
    with ObservingMode(before=[counter.count]):
        calls_of(name, torch.bfloat16)["weight_grad"]()
    assert used == ["weight_grad"]
    assert counted == [2 * ROWS * COLUMNS * OUT]
    codes = torch.empty(ROWS, COLUMNS // 2, dtype=torch.float4_e2m1fn_x2, device="meta")
    weights = torch.empty(EXPERTS, OUT, COLUMNS // 2, dtype=torch.float4_e2m1fn_x2, device="meta")
    counter.count(torch.ops.aten._scaled_grouped_mm_v2.default, (codes, weights.mT), {})
    assert counted[1:] == counted[:1]


def test_no_rows_at_all_give_no_gradient(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_device(monkeypatch, ScaledProduct.EXPERT_MXFP8)
    products = build_products("mxfp8")
    x, g = (torch.empty(0, width, dtype=torch.bfloat16) for width in (COLUMNS, OUT))
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    weights = draw(EXPERTS, OUT, COLUMNS, seed=3)
    assert products.forward(x, weights, ends).shape == (0, OUT)
    assert not bool(products.weight_grad(g, x, ends).any())


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "mxfp8", "nvfp4"])
def test_what_torch_would_refuse_is_widened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, product, _ = CASES[name]
    give_device(monkeypatch, product)
    recipe = recipe_of(name)

    def find(out: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> ScaledProduct | None:
        x = convert(draw(ROWS, columns, seed=1), recipe.inputs, Groups(ends=ENDS))
        w = convert(draw(EXPERTS * out, columns, seed=2), recipe.weights)
        return find_group_product(x, w, torch.Size((EXPERTS, out, columns)), dtype)

    assert find(OUT, COLUMNS) is product
    assert find(OUT, COLUMNS, torch.float32) is None
    assert find(OUT + 8, COLUMNS) is None
    assert find(OUT, COLUMNS + 8) is None
    assert (find(OUT, COLUMNS + 16) is product) == (product is ScaledProduct.EXPERT_ROWS)
    give_device(monkeypatch)
    assert find(OUT, COLUMNS) is None


def test_gradients_in_e5m2_have_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    give_device(monkeypatch, *ScaledProduct)
    recipe = recipe_of("fp8")
    assert recipe.gradients.number is NarrowFormat.E5M2
    g = convert(draw(ROWS, OUT, seed=1), recipe.gradients, Groups(ends=ENDS))
    w = convert(draw(EXPERTS * COLUMNS, OUT, seed=2), recipe.weights)
    shape = torch.Size((EXPERTS, COLUMNS, OUT))
    assert find_group_product(g, w, shape, torch.bfloat16) is None
