"""Weights are converted once a step, and nothing that is computed differs by a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layout_proof import WORKLOAD, build_batches, draw_test_weight
from layout_space import SHAPES
from moewright.engine.kernels import weight_copies
from moewright.engine.kernels.low_precision import NarrowWeight, convert_weight
from moewright.engine.kernels.products import Conversions, NarrowProducts
from moewright.engine.kernels.weight_copies import CopiedWeight, WeightCopies
from moewright.engine.model.layers import list_parameters
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.rules.job import Job
from moewright.rules.low_precision import OperandFormat, find_recipe
from moewright.rules.weight_copies import copied_weights, weight_copy_rows
from moewright.spec.layout import CapacityFill, CudaGraphScope, Layout, Recompute
from moewright.spec.ledger import Module
from moewright.spec.workload import (
    BaseQuantization,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    RouterForce,
    Task,
    TensorScaling,
    Workload,
)

CPU = torch.device("cpu")
FORMATS = {
    "current": (Dtype.FP8, TensorScaling.CURRENT),
    "delayed": (Dtype.FP8, TensorScaling.DELAYED),
    "blockwise": (Dtype.FP8, TensorScaling.BLOCKWISE),
    "mxfp8": (Dtype.MXFP8, TensorScaling.CURRENT),
    "nvfp4": (Dtype.NVFP4, TensorScaling.CURRENT),
}


def workload_in(name: str, **changes: object) -> Workload:
    precision, scaling = FORMATS[name]
    return replace(WORKLOAD, precision=precision, tensor_scaling=scaling, **changes)


def train(job: Job, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return the losses and norms, the weights at the end, and the bytes of copies."""
    state = build_train_state(
        job,
        build_batches(job.workload, job.model),
        rank=0,
        device=CPU,
        initial_value=draw_test_weight,
    )
    curve = []
    for step in range(1, steps + 1):
        result = train_step(state, step=step, lr=0.01, stop_requested=False, count_ledger=False)
        curve += [result.backward.loss, result.backward.grad_norm]
    weights = {named.name: named.parameter.detach() for named in list_parameters(state.model)}
    return curve, weights, sum(row.bytes for row in state.runtime.weight_copies.memory_rows())


@pytest.mark.turns
@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_differs_and_the_bytes_are_as_the_rules_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change between the steps; recomputed parts read the copies too."""
    layout = Layout(world_size=1, mbs=2, recompute=(Recompute.MOE, Recompute.MLP))
    job = Job(model=SHAPES["qwen"], workload=workload_in(name), layout=layout)
    curve, weights, nbytes = train(job)
    assert nbytes == sum(row.bytes for row in weight_copy_rows(job, 0)) > 0
    monkeypatch.setattr(weight_copies, "keeps_copies", lambda micro_batches: False)
    plain_curve, plain_weights, plain_bytes = train(job)
    assert (curve, plain_bytes) == (plain_curve, 0)
    for weight_name, weight in weights.items():
        assert torch.equal(weight, plain_weights[weight_name]), weight_name


@pytest.mark.thorough
def test_replayed_steps_convert_the_weights_of_each() -> None:
    job = Job(
        model=SHAPES["qwen"],
        workload=workload_in("mxfp8", router=replace(WORKLOAD.router, force=RouterForce.BALANCED)),
        layout=Layout(world_size=1, mbs=4, capacity=1.0, capacity_fill=CapacityFill.PADDED),
    )
    graphs = replace(job.layout, graphs=(CudaGraphScope.FULL,))
    assert train(replace(job, layout=graphs), steps=5)[0] == train(job, steps=5)[0]


def test_a_weight_is_converted_both_ways_once_a_step_and_a_frozen_one_once() -> None:
    seen: list[torch.Tensor] = []

    def note(w: torch.Tensor, operand: OperandFormat) -> NarrowWeight:
        seen.append(w)
        return convert_weight(w, operand)

    trained, frozen = torch.ones(32, 64), torch.ones(32, 64)
    copies = WeightCopies()
    copies.register(
        CopiedWeight(tensor=weight, module=Module.ATTENTION, is_trained=weight is trained)
        for weight in (trained, frozen)
    )
    recipe = find_recipe(workload_in("mxfp8"))
    assert recipe is not None
    products = NarrowProducts(recipe, CPU, 1, Conversions(convert_weight=note), copies)

    def run_passes() -> int:
        seen.clear()
        for weight in (trained, frozen) * 3:
            products.forward(torch.ones(32, 64), weight)
            products.input_grad(torch.ones(32, 32), weight)
        return len(seen)

    copies.begin_step(3)
    assert run_passes() == 2
    copies.end_passes()
    trained.fill_(3.0)
    # Outside of a step nothing is kept, and no copy of a weight that may have changed is read.
    assert run_passes() == 0
    assert float(products.forward(torch.ones(32, 64), trained)[0, 0]) == 192
    copies.begin_step(3)
    assert run_passes() == 1
    assert float(products.forward(torch.ones(32, 64), trained)[0, 0]) == 192
    copies.begin_step(1)
    assert run_passes() == 0
    assert not copies.memory_rows()


LORA = FineTuningSpec(task=Task.LORA, lora_rank=4)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("shape", "fine_tuning"),
    [
        *((shape, FineTuningSpec()) for shape in SHAPES),
        ("qwen", LORA),
        ("qwen", replace(LORA, quantize_base=BaseQuantization.NF4)),
        ("qwen", FineTuningSpec(freeze=(FrozenPart.EXPERTS,))),
    ],
)
def test_every_narrow_product_reads_a_copy(
    shape: str, fine_tuning: FineTuningSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight is converted that the rules do not name, but for a packed base."""
    model = SHAPES[shape]
    workload = workload_in("mxfp8", fine_tuning=fine_tuning)
    job = Job(model=model, workload=workload, layout=Layout(world_size=1, mbs=4))
    packed = fine_tuning.quantize_base is BaseQuantization.NF4
    direct = []
    take = WeightCopies.find

    def find(copies: WeightCopies, *args: object) -> object:
        found = take(copies, *args)  # type: ignore[arg-type]
        if found is None:
            direct.append(args[0])
        return found

    monkeypatch.setattr(WeightCopies, "find", find)
    _, _, nbytes = train(job, steps=1)
    assert bool(direct) == packed
    assert nbytes == sum(row.bytes for row in weight_copy_rows(job, 0))


@pytest.mark.parametrize(
    ("layout", "has_copies"),
    [
        (Layout(world_size=4, zero=2), True),
        (Layout(world_size=4, zero=3), False),
        (Layout(world_size=4, ep=4, zero=3), True),  # experts are in flat buffers
        (Layout(world_size=4, graphs=(CudaGraphScope.ATTN,)), False),
        (Layout(world_size=4, graphs=(CudaGraphScope.FULL,)), True),
        (Layout(world_size=4, mbs=2), False),  # one micro-batch
    ],
)
def test_what_does_not_stay_whole_has_no_copy(layout: Layout, *, has_copies: bool) -> None:
    job = Job(model=SHAPES["qwen"], workload=workload_in("nvfp4"), layout=layout)
    assert bool(weight_copy_rows(job, 0)) == has_copies
    names = [param.name for param in copied_weights(job, 0)]
    if layout.zero == 3 and has_copies:
        assert all(".experts." in name for name in names)
