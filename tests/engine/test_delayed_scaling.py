"""Delayed FP8 scales are Transformer Engine's, and casts by them those of torch's 8-bit types."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

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
from moewright.engine.run.train_state import TrainState, scale_shards
from moewright.rules.delayed_scaling import (
    ScaledLinear,
    delayed_scaling_rows,
    scaled_linears,
)
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
        ScaledLinear(
            name=f"linear{place}", module=Module.EXPERTS, experts=count, owned=tuple(range(count))
        )
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
    states = {state.name: state.tensor for state in scaling.owned_states()}
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
    kept = {state.name: state.tensor.clone() for state in scaling.owned_states()}
    products = scaling.products_of("linear0")
    scaling.begin_step()
    products.forward(torch.full((4, 4), torch.nan), torch.full((4, 4), torch.inf))
    scaling.update(scaling.step_amaxes())
    assert kept["optim/fp8_scale/linear0"].tolist() == [[224.0, 112.0, 7168.0]]
    for state in scaling.owned_states():
        assert torch.equal(state.tensor, kept[state.name]), state.name


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
    linear = ScaledLinear(
        name="linear0", module=Module.EXPERTS, experts=3, owned=(1,), replicated=(2, 0)
    )
    assert RECIPE is not None
    scaling = DelayedScaling(DelayedScalingSpec(), RECIPE, [linear], CPU, lambda: True)
    products = scaling.products_of_replicas("linear0")
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
    owned, *_ = scaling.products_of("linear0").convert_input(x, torch.tensor([6])).tensors
    assert torch.equal(
        owned.float(), (x.float() * 448.0 / 9.0).clamp(-448, 448).to(owned.dtype).float()
    )


def test_a_rank_holds_the_histories_of_its_slots() -> None:
    """Its own experts, which it saves by their numbers, and replicas, which it loads."""
    linear = ScaledLinear(name="w", module=Module.EXPERTS, experts=4, owned=(3, 1), replicated=(0,))
    assert RECIPE is not None
    spec = DelayedScalingSpec(amax_history_len=2)
    scaling = DelayedScaling(spec, RECIPE, [linear], CPU, lambda: True)
    scaling.update(torch.arange(1.0, 13.0).view(4, 3))
    shards = [shard for shard in scale_shards(scaling.held_states()) if "history" in shard.name]
    assert [(shard.offsets, shard.global_shape) for shard in shards] == [
        ((number, 0, 0), (4, 3, 2)) for number in (3, 1, 0)
    ]
    newest = [shard.tensor[0, :, 0].tolist() for shard in shards]
    assert newest == [[10.0, 11.0, 12.0], [4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    assert len(list(scale_shards(scaling.owned_states()))) == 4
    in_order = replace(linear, owned=(2, 3), replicated=())
    (history, _) = scale_shards(
        DelayedScaling(spec, RECIPE, [in_order], CPU, lambda: True).owned_states()
    )
    assert (history.offsets, history.tensor.shape) == ((2, 0, 0), (2, 3, 2))


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ("ep2,mbs2", 4),
        ("ep4,mbs2,expert_placement=balanced,spare1", 3),
        ("pp2,ep2,mbs2,layout='Et|ttL'", 4),
    ],
)
def test_the_plan_counts_what_a_rank_holds(layout: str, held: int) -> None:
    """A history of L and a scale for each expert held, an amax for each of all eight."""
    loads = ((90, 10, 50, 20, 70, 30, 5, 60),) * 4
    plan = tiny_jobs.build_plan(replace(DELAYED, load_histogram=loads), layout, world_size=4)
    job = plan_job(plan)
    assert RECIPE is not None
    ranks = product(range(job.layout.pp), range(job.layout.ep))
    for pp_rank, ep_rank in ranks:
        linears = scaled_linears(job, pp_rank, ep_rank)
        scaling = DelayedScaling(job.workload.delayed, RECIPE, linears, CPU, lambda: True)
        rows = scaling.memory_rows()
        assert list(delayed_scaling_rows(job, pp_rank)) == rows
        of_experts = {row.bytes for row in rows if row.module is Module.EXPERTS}
        assert of_experts == {4 * 3 * (held * (2 + 1) + 8)}


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
    trained = build_state(SHAPES[shape])
    scaling = trained.runtime.delayed_scaling
    assert scaling is not None
    for step in (1, 2):
        train_step(trained, step=step, lr=1e-3, stop_requested=False, count_ledger=False)
    for state in scaling.owned_states():
        if "amax_history" in state.name:
            assert (state.tensor.amax((0, 2)) > 0).all(), state.name


def test_a_skipped_step_moves_no_history_on() -> None:
    trained = build_state(SHAPES["qwen"])
    scaling = trained.runtime.delayed_scaling
    assert scaling is not None
    train_step(trained, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    kept = {state.name: state.tensor.clone() for state in scaling.owned_states()}
    assert kept["optim/amax_history/layers.0.attention.q.weight"][:, :, 0].all()
    with torch.no_grad():
        trained.model.embedding.weight[:] = torch.nan
    assert train_step(trained, step=2, lr=1e-3, stop_requested=False, count_ledger=False).skipped
    for state in scaling.owned_states():
        assert torch.equal(state.tensor, kept[state.name]), state.name
