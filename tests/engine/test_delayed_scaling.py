"""Delayed FP8 scales are Transformer Engine's, and casts by them those of torch's 8-bit types."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, draw_batches
from layout_space import SHAPES
from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.run.train_state import TrainState
from moewright.rules.delayed_scaling import ScaledLinear
from moewright.rules.job import plan_job
from moewright.rules.low_precision import find_recipe
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import AmaxComputeAlgo, DelayedScalingSpec, Dtype, TensorScaling
from selection import thorough

DELAYED = replace(
    WORKLOAD,
    precision=Dtype.FP8,
    tensor_scaling=TensorScaling.DELAYED,
    delayed=DelayedScalingSpec(amax_history_len=2),
)
RECIPE = find_recipe(DELAYED)
assert RECIPE is not None
CPU = torch.device("cpu")
TOPS = (448.0, 448.0, 57344.0)  # of E4M3 for inputs and weights, of E5M2 for gradients


def build_scaling(
    spec: DelayedScalingSpec, *experts: int, is_first_forward: bool = True
) -> DelayedScaling:
    linears = [
        ScaledLinear(name=f"linear{place}", module=Module.EXPERTS, experts=count)
        for place, count in enumerate(experts)
    ]
    assert RECIPE is not None
    return DelayedScaling(spec, RECIPE, linears, CPU, lambda: is_first_forward)


def update_as_transformer_engine(
    slots: list[float], scale: np.float32, top: np.float32, algorithm: AmaxComputeAlgo
) -> np.float32:
    """Move a history on and return the next scale.

    This is kernel_bulk of transformer_engine/common/recipe/delayed_scaling.cu (commit d0067d0), a
    tensor at a time. Slot 0 is of the amax of the step that ends, and 0 afterwards.
    """
    last = slots[0]
    amax = 0.0
    if last != 0:
        slots[:] = [*slots[1:], last]
        amax = max(slots)
        slots[0] = 0.0
    if algorithm is AmaxComputeAlgo.MOST_RECENT:
        amax = last
    if math.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scale = top / np.float32(amax)
    return np.finfo(np.float32).max if np.isinf(scale) else scale


@pytest.mark.parametrize("algorithm", AmaxComputeAlgo)
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (3, 2)])
def test_scales_are_those_of_transformer_engine(
    algorithm: AmaxComputeAlgo, length: int, margin: int
) -> None:
    """Amaxes of zero, of numbers that no scale can bring up to the format, and large ones."""
    spec = DelayedScalingSpec(
        amax_history_len=length, amax_compute_algo=algorithm, fp8_margin=margin
    )
    scaling = build_scaling(spec, 1, 4)
    states = dict(scaling.named_states())
    draws = torch.Generator().manual_seed(3)
    slots = [[0.0] * length for _ in range(15)]
    scales = [np.float32(1)] * 15
    for _ in range(9):
        amaxes = torch.rand(5, 3, generator=draws) * 10.0 ** torch.randint(
            -3, 4, (5, 3), generator=draws
        )
        amaxes[torch.rand(5, 3, generator=draws) < 0.3] = 0.0
        amaxes[1, 1] = 1e-42
        scaling.update(amaxes)
        for place, amax in enumerate(amaxes.flatten().tolist()):
            slots[place][0] = amax
            top = np.float32(TOPS[place % 3] * 2.0**-margin)
            scales[place] = update_as_transformer_engine(
                slots[place], scales[place], top, algorithm
            )
        actual = torch.cat([states[f"optim/fp8_scale/linear{i}"] for i in range(2)])
        assert actual.flatten().tolist() == [float(scale) for scale in scales]


def test_an_amax_that_is_not_finite_moves_nothing_on() -> None:
    scaling = build_scaling(DelayedScalingSpec(amax_history_len=2), 1)
    scaling.update(torch.tensor([[2.0, 4.0, 8.0]]))
    kept = {name: state.clone() for name, state in scaling.named_states()}
    products = scaling.products_of("linear0")
    scaling.begin_step()
    products.forward(torch.full((4, 4), torch.nan), torch.full((4, 4), torch.inf))
    scaling.update(scaling.step_amaxes())
    assert kept["optim/fp8_scale/linear0"].tolist() == [[224.0, 112.0, 7168.0]]
    for name, state in scaling.named_states():
        assert torch.equal(state, kept[name]), name


def test_a_step_has_the_largest_of_all_its_passes() -> None:
    scaling = build_scaling(DelayedScalingSpec(), 1)
    products = scaling.products_of("linear0")
    x = torch.tensor([[1.0, -6.0]])
    w = torch.tensor([[0.5, 0.25]])
    scaling.begin_step()
    for factor in (1.0, 0.5, 1.0):  # two micro-batches, one of which is recomputed
        products.forward(factor * x, w)
        products.convert_input(100 * x)
        products.input_grad(factor * torch.tensor([[-3.0]]), w)
        products.weight_grad(torch.full((1, 1), 50.0), 100 * x)
    assert scaling.step_amaxes().tolist() == [[6.0, 0.5, 3.0]]
    scaling.begin_step()
    assert not scaling.step_amaxes().any()


def test_a_recomputed_forward_notes_nothing() -> None:
    """Its input may have been kept in 8 bits, whose rounding can be above the amax."""
    scaling = build_scaling(DelayedScalingSpec(), 1, is_first_forward=False)
    products = scaling.products_of("linear0")
    products.forward(torch.ones(1, 2), torch.ones(1, 2))
    products.input_grad(torch.ones(1, 1), torch.ones(1, 2))
    assert scaling.step_amaxes().tolist() == [[0.0, 0.0, 1.0]]


def test_casts_are_saturated_products_in_torchs_own_types() -> None:
    """Numbers above what the scale leaves room for become the format's largest."""
    scaling = build_scaling(DelayedScalingSpec(), 3)
    products = scaling.products_of("linear0", (2, 0))
    amaxes = torch.tensor([[1.0, 1.0, 1.0], [9.0, 9.0, 9.0], [0.25, 1.0, 1.0]])
    scaling.update(amaxes)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = products.convert_input(x, torch.tensor([2, 6]))
    scales = torch.tensor([448.0 / 0.25] * 2 + [448.0] * 4)[:, None]
    expected = (x.float() * scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (x.float() * scales).abs().max() > 448
    assert torch.equal(narrow.codes.view(torch.uint8), expected.view(torch.uint8))
    assert narrow.group_scales is not None
    assert torch.equal(narrow.group_scales, 1 / torch.tensor([448.0 / 0.25, 448.0]))
    scaling.begin_step()
    products.forward(x, torch.ones(2, 4, 5).bfloat16(), torch.tensor([2, 6]))
    seen = scaling.step_amaxes()[:, 0]
    assert seen.tolist() == [float(x[2:].abs().max()), 0.0, float(x[:2].abs().max())]


def test_products_are_those_of_torchs_scaled_matmul() -> None:
    """All three, with operands in E4M3 and gradients in E5M2, to the rounding of fp32 sums."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(32, 48, generator=draws)
    w = torch.randn(16, 48, generator=draws)
    g = torch.randn(32, 16, generator=draws)
    scaling = build_scaling(DelayedScalingSpec(), 1)
    scaling.update(torch.tensor([[2.5, 2.0, 3.0]]))
    products = scaling.products_of("linear0")
    tops = dict(zip("xwg", TOPS, strict=True))
    dtypes = {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "g": torch.float8_e5m2}
    scales = {"x": 448.0 / 2.5, "w": 448.0 / 2.0, "g": 57344.0 / 3.0}

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * scales[name]).clamp(-tops[name], tops[name]).to(dtypes[name])

    def multiply(a: str, left: torch.Tensor, b: str, right: torch.Tensor) -> torch.Tensor:
        # The right operand is column-major, as cuBLAS wants it.
        columns = right.T.contiguous().T
        inverse = torch.tensor(1 / scales[a]), torch.tensor(1 / scales[b])
        return torch._scaled_mm(left.contiguous(), columns, *inverse, out_dtype=torch.float32)

    x8, w8, g8 = cast("x", x), cast("w", w), cast("g", g)
    pairs = (
        (products.forward(x, w), multiply("x", x8, "w", w8.T)),
        (products.input_grad(g, w), multiply("g", g8, "w", w8)),
        (products.weight_grad(g, x), multiply("g", g8.T, "x", x8)),
    )
    for actual, expected in pairs:
        # Both round sums of up to 48 products of fp32 numbers.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def build_state(model: ModelSpec, layout: str = "mbs4") -> TrainState:
    return build_train_state(
        plan_job(tiny_jobs.build_plan(DELAYED, layout, world_size=1, model=model)),
        draw_batches(model),
        rank=0,
        device=CPU,
        initial_value=draw_initial_value,
    )


@pytest.mark.parametrize(
    "shape", ["deepseek", thorough("ahead"), "delta", thorough("hybrid"), thorough("sparse")]
)
def test_every_linear_has_scales_and_all_scales_are_used(shape: str) -> None:
    """A weight that rules.delayed_scaling leaves out raises where it is multiplied."""
    state = build_state(SHAPES[shape])
    scaling = state.runtime.delayed_scaling
    assert scaling is not None
    for step in (1, 2):
        train_step(state, step=step, lr=1e-3, stop_requested=False, count_ledger=False)
    for name, history in scaling.named_states():
        if "amax_history" in name:
            assert (history.amax((0, 2)) > 0).all(), name


def test_a_skipped_step_moves_no_history_on() -> None:
    state = build_state(SHAPES["qwen"])
    scaling = state.runtime.delayed_scaling
    assert scaling is not None
    train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    kept = {name: tensor.clone() for name, tensor in scaling.named_states()}
    assert kept["optim/amax_history/layers.0.attention.q.weight"][:, :, 0].all()
    with torch.no_grad():
        state.model.embedding.weight[:] = torch.nan
    assert train_step(state, step=2, lr=1e-3, stop_requested=False, count_ledger=False).skipped
    for name, tensor in scaling.named_states():
        assert torch.equal(tensor, kept[name]), name
