"""Training adapters beside frozen weights: in any layout as in one process, and what is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from layout_space import SHAPES
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.adapters import adapter_parameters, frozen_part, is_trained
from moewright.rules.shapes.parameters import parameters
from moewright.spec.errors import BadInput
from moewright.spec.ledger import Component, Ledger
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    BaseQuantization,
    DataSpec,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    Task,
)
from selection import thorough
from tiny_jobs import read_state, read_steps

pytestmark = pytest.mark.spawn
ATTENTION = FineTuningSpec(task=Task.LORA, lora_rank=4, lora_alpha=8.0, lora_router=True)
EXPERTS = replace(ATTENTION, lora_experts=True)
STEPS = 3
STATES = (Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS)


def build_plan(
    data: DataSpec,
    layout: str,
    world_size: int,
    fine_tuning: FineTuningSpec,
    model: ModelSpec = tiny_jobs.MODEL,
) -> Plan:
    workload = tiny_jobs.build_workload(data, steps=STEPS, global_batch=4, fine_tuning=fine_tuning)
    workload = replace(
        workload,
        optimizer=replace(workload.optimizer, bucket_elements=4000, eps=1e-4),
        checkpoint=replace(workload.checkpoint, every_steps=1, keep=STEPS),
    )
    return tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model)


def train_whole_and_cut(
    whole: Plan, cut: Plan, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train in one process and over a layout, in folder/one and folder/cut; return the states."""
    for name, plan in (("one", whole), ("cut", cut)):
        assert train(plan, folder / name) is ExitCode.DONE
    steps = whole.workload.steps
    expected, actual = (read_state(folder / name, steps) for name in ("one", "cut"))
    assert expected.keys() == actual.keys()
    return expected, actual


def assert_near(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual - expected).norm() / expected.norm())
    assert error <= 2e-4, (name, error)


def assert_trained_alike(
    expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], folder: Path
) -> None:
    """Compare the first moments, the losses and the gradient norms of folder/one and folder/cut."""
    for name, value in expected.items():
        if name.startswith("optim/exp_avg/"):
            assert_near(name, actual[name], value)
    for step, reference in zip(read_steps(folder / "cut"), read_steps(folder / "one"), strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "fine_tuning"),
    [
        (4, "tp2,ep2,recompute=full", EXPERTS),
        thorough(4, "pp2,ep2,layout='Et|ttL'", EXPERTS),
        thorough(4, "etp2,ep2", ATTENTION),
        thorough(4, "tp2,ep4,zero0,recompute=moe+mlp", EXPERTS),
        thorough(2, "pp2,schedule=zb-h1,layout='Et|ttL'", EXPERTS),
        thorough(4, "cp2,ep2,overlap=grad+param", EXPERTS),
    ],
)
def test_adapters_train_as_in_one_process(
    world_size: int, layout: str, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    plans = build_plan(data, "", 1, fine_tuning), build_plan(data, layout, world_size, fine_tuning)
    expected, actual = train_whole_and_cut(*plans, tmp_path)
    names = {param.name for param in adapter_parameters(tiny_jobs.MODEL, fine_tuning)}
    assert {name for name in expected if not name.startswith("optim/")} == names
    assert_trained_alike(expected, actual, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "layout", "fine_tuning"),
    [
        (2, "tp2,ep2", EXPERTS),
        thorough(2, "pp2,schedule=zb-h1,recompute=full", EXPERTS),
        thorough(2, "ep2,zero0", replace(EXPERTS, quantize_base=BaseQuantization.NF4)),
        thorough(2, "tp2,ep2", FineTuningSpec(freeze=(FrozenPart.ATTENTION,))),
        thorough(2, "ep2", FineTuningSpec(freeze=(FrozenPart.EMBEDDINGS, FrozenPart.EXPERTS))),
    ],
)
def test_compressed_attention_is_tuned_as_in_one_process(
    world_size: int, layout: str, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(SHAPES["compressed_ahead"], vocab_size=tiny_jobs.VOCABULARY)
    whole, cut = (
        build_plan(data, *text_and_size, fine_tuning, model)
        for text_and_size in (("", 1), (layout, world_size))
    )
    expected, actual = train_whole_and_cut(whole, cut, tmp_path)
    trained = {name.removeprefix("optim/exp_avg/") for name in expected if "/exp_avg/" in name}
    if fine_tuning.task is Task.LORA:
        assert trained == {param.name for param in adapter_parameters(model, fine_tuning)}
        assert not any("position" in name or ".o_down." in name for name in trained)
    else:
        names = {param.name for param in parameters(model)}
        assert trained == {name for name in names if is_trained(fine_tuning, name)}
    assert_trained_alike(expected, actual, tmp_path)


FROZEN = FineTuningSpec(freeze=(FrozenPart.ROUTER, FrozenPart.EMBEDDINGS, FrozenPart.ATTENTION))
FROZEN_MLPS = FineTuningSpec(task=Task.SFT, freeze=(FrozenPart.EXPERTS, FrozenPart.MLP))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "fine_tuning"),
    [
        (2, "tp2,ep2", FROZEN),
        thorough(2, "pp2,layout='Et|ttL'", FROZEN),
        thorough(2, "pp2,schedule=zb-h1,layout='Et|ttL'", FROZEN_MLPS),
        thorough(2, "ep2,zero0,recompute=full", FROZEN_MLPS),
        thorough(4, "tp2,ep4,overlap=grad+param", FROZEN_MLPS),
    ],
)
def test_models_with_frozen_parts_train_as_in_one_process(
    world_size: int, layout: str, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    """Frozen weights are the initial ones to the last bit, and have no state; the others move."""
    plans = build_plan(data, "", 1, fine_tuning), build_plan(data, layout, world_size, fine_tuning)
    expected, actual = train_whole_and_cut(*plans, tmp_path)
    first = read_state(tmp_path / "one", 1)
    names = {param.name for param in parameters(tiny_jobs.MODEL)}
    frozen = {name for name in names if not is_trained(fine_tuning, name)}
    assert frozen
    assert {frozen_part(name) for name in frozen} == set(fine_tuning.freeze)
    for name in names:
        has_state = f"optim/exp_avg/{name}" in expected
        assert has_state == (name not in frozen)
        assert torch.equal(expected[name], first[name]) == (name in frozen)
        if name in frozen:
            assert torch.equal(expected[name], actual[name])
        else:
            moment = f"optim/exp_avg/{name}"
            assert_near(moment, actual[moment], expected[moment])


def test_a_run_with_frozen_parts_goes_on_with_the_same_parts_alone(
    data: DataSpec, tmp_path: Path
) -> None:
    plan = build_plan(data, "", 1, FROZEN)
    optimizer = replace(plan.workload.optimizer, decay_steps=STEPS)
    whole = replace(plan, workload=replace(plan.workload, optimizer=optimizer))
    half = replace(whole, workload=replace(whole.workload, steps=2))
    for folder, plans in (("whole", [whole]), ("halves", [half, whole])):
        for part in plans:
            assert train(part, tmp_path / folder) is ExitCode.DONE
    expected, actual = (read_state(tmp_path / name, STEPS) for name in ("whole", "halves"))
    assert all(actual[name].equal(value) for name, value in expected.items())
    wrong = replace(whole, workload=replace(whole.workload, fine_tuning=FROZEN_MLPS))
    with pytest.raises(BadInput, match="fine_tuning"):
        train(wrong, tmp_path / "whole")


def test_frozen_parts_begin_from_a_checkpoint_of_wider_weights(
    data: DataSpec, tmp_path: Path
) -> None:
    whole = build_plan(data, "", 1, FineTuningSpec())
    whole = replace(whole, workload=replace(whole.workload, steps=1, precision=Dtype.BF16))
    assert train(whole, tmp_path / "whole") is ExitCode.DONE
    weights = str(tmp_path / "whole" / "checkpoints" / "step-00000001")
    narrow = replace(whole.workload, weights=weights, fine_tuning=FROZEN)
    assert train(replace(whole, workload=narrow), tmp_path / "frozen") is ExitCode.DONE
    expected, actual = (read_state(tmp_path / name, 1) for name in ("whole", "frozen"))
    assert expected["embedding.weight"].dtype == torch.float32
    assert torch.equal(actual["embedding.weight"], expected["embedding.weight"].bfloat16())


def test_a_run_of_adapters_goes_on_with_its_own_choices_alone(
    data: DataSpec, tmp_path: Path
) -> None:
    plan = build_plan(data, "", 1, ATTENTION)
    half = replace(plan, workload=replace(plan.workload, steps=2))
    optimizer = replace(plan.workload.optimizer, decay_steps=STEPS)
    whole = replace(plan, workload=replace(plan.workload, optimizer=optimizer))
    half = replace(half, workload=replace(half.workload, optimizer=optimizer))
    for folder, plans in (("whole", [whole]), ("halves", [half, whole])):
        for part in plans:
            assert train(part, tmp_path / folder) is ExitCode.DONE
    expected, actual = (read_state(tmp_path / name, STEPS) for name in ("whole", "halves"))
    assert all(actual[name].equal(value) for name, value in expected.items())
    other = replace(ATTENTION, lora_alpha=4.0)
    wrong = replace(whole, workload=replace(whole.workload, fine_tuning=other))
    with pytest.raises(BadInput, match="fine_tuning"):
        train(wrong, tmp_path / "whole")


@pytest.mark.turns
@pytest.mark.parametrize("layout", ["tp2,ep2", thorough("pp2,zero0,layout='Et|ttL'")])
def test_states_of_adapters_and_frozen_weights_are_those_of_the_plan(
    layout: str, data: DataSpec, tmp_path: Path
) -> None:
    plan = build_plan(data, layout, 2, EXPERTS)
    assert train(plan, tmp_path) is ExitCode.DONE
    for rank in range(2):
        counted = read_json(Ledger, tmp_path / "ledger" / f"rank{rank:05d}.json")
        predicted = predict_ledger(plan, rank=rank, selection=None)
        states, expected = (
            {
                (row.component, row.module): row.bytes
                for row in ledger.memory
                if row.component in STATES and row.bytes
            }
            for ledger in (counted, predicted)
        )
        assert states == expected


@pytest.mark.parametrize(
    ("layout", "fine_tuning", "field"),
    [
        ("zero3", ATTENTION, "layout.zero"),
        ("etp2", EXPERTS, "layout.etp"),
        ("zero3", FROZEN, "layout.zero"),
        ("", replace(ATTENTION, freeze=(FrozenPart.ROUTER,)), "train.freeze"),
        ("ep2", replace(EXPERTS, lora_rank=3), "train.lora_rank"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused_by_name(
    layout: str, fine_tuning: FineTuningSpec, field: str, data: DataSpec, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as caught:
        train(build_plan(data, layout, 2, fine_tuning), tmp_path)
    assert field in [reason.field for reason in caught.value.reasons]
