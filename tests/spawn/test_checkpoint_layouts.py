"""A run moves from any layout to any other: it loads what was saved, and the curve goes on.

Every source trains six steps and is saved after the third; every target takes that checkpoint up.
`make test` takes a few pairs, others with every change of the source; `make verify-layouts` all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import tiny_jobs
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.engine.checkpoint import Coordinator, save_checkpoint
from moewright.engine.run import train, training_loop
from moewright.engine.run.peer_copies import PeerCopies
from moewright.engine.run.restore import restore
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DataSpec,
    DelayedScalingSpec,
    Dtype,
    LossScalingSpec,
    LossSpec,
    RouterTraining,
    TensorScaling,
)
from tiny_jobs import read_checkpoint

pytestmark = pytest.mark.spawn

STEPS = 6
SAVED = 3
# The pair of every test: other ranks, stages and shards on each side.
_IN_EVERY_TEST = "deepseek: 4x tp2,ep2,mbs2 -> 2x pp2,schedule=zbv,mbs2,layout='Et|t|t|tL'"

# Latent attention, a moving expert bias, a shared expert, a padded vocabulary.
_DEEP = replace(SHAPES["deepseek"], vocab_size=tiny_jobs.VOCABULARY + 1)
MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "deepseek": _DEEP,
        "mtp": replace(_DEEP, mtp_layers=1),
        "fp16": replace(_DEEP, name="in-fp16"),
        "fp8": _DEEP,
    }
)
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepseek": (
            "1x mbs2",
            "4x tp2,ep2,mbs2",
            "4x pp2,vpp2,ep2,mbs2,layout='Et|tt|t|L'",
            "4x ep2,zero3,mbs2",
            "4x cp2,etp2,ep2,zero0,mbs2",
        ),
        "mtp": (
            "1x mbs2",
            "4x tp2,ep2,mbs2",
            "4x tp2,cp2,ep4,zero3,mbs2",
            "4x pp2,ep2,mbs2,layout='Et|tttmL'",
        ),
        "fp16": ("2x ep2,mbs2", "2x pp2,mbs2,layout='Ettt|tL'"),
        "fp8": (
            "2x tp2,etp2,mbs2",
            "2x pp2,mbs2,layout='Ettt|tL'",
            "4x ep4,mbs2,expert_placement=balanced,spare1",
        ),
    }
)
# Targets in addition to the sources themselves.
TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepseek": (
            "2x pp2,schedule=zbv,mbs2,layout='Et|t|t|tL'",
            "2x pp2,schedule=dualpipev,mbs2,layout='E|tt|t|tL'",
            "3x pp3,mbs2,layout='Et|tt|tL'",
            "4x pp2,ep2,schedule=zb-h1,overlap=grad+param,mbs2,layout='Et|tttL'",
            "4x tp4,etp2,ep2,mbs2,recompute=full",
            "8x tp2,cp2,ep4,mbs2,dispatcher=allgather",
            "8x pp2,tp2,ep4,zero0,mbs2,layout='Ettt|tL'",
            "2x zero3,mbs2",
            "4x tp2,etp2,ep2,zero3,mbs2",
            "4x ep2,zero3,shard=2,mbs2",
        ),
        "mtp": ("2x tp2,etp2,mbs2", "8x pp2,tp2,ep4,mbs2"),
        "fp16": ("2x tp2,etp2,offload=optimizer,mbs2",),
        "fp8": ("2x ep2,zero3,mbs2",),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    group: str
    source: str
    target: str

    @property
    def id(self) -> str:
        return f"{self.group}: {self.source} -> {self.target}"


PAIRS = tuple(
    Pair(group=group, source=source, target=target)
    for group, sources in SOURCES.items()
    for source in sources
    for target in (*sources, *TARGETS[group])
)


def mark_cases() -> list[object]:
    assert _IN_EVERY_TEST in {pair.id for pair in PAIRS}
    return [
        pytest.param(
            pair, id=pair.id, marks=() if pair.id == _IN_EVERY_TEST else (pytest.mark.thorough,)
        )
        for pair in PAIRS
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(
    data: DataSpec, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Return a function that makes a run of all steps with a checkpoint halfway, each once."""
    runs: dict[tuple[str, str], Path] = {}

    def make_run(group: str, layout: str) -> Path:
        if (group, layout) not in runs:
            runs[group, layout] = tmp_path_factory.mktemp("whole")
            assert train.train(make_plan(data, group, layout), runs[group, layout]) is ExitCode.DONE
        return runs[group, layout]

    return make_run


def make_plan(data: DataSpec, group: str, layout: str) -> Plan:
    """Build a plan with several gradient buckets; an fp16 scale doubles before the save."""
    loss = LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, z_coeff=0.001, mtp_coeff=0.3)
    workload = tiny_jobs.build_workload(
        data, steps=STEPS, loss=loss, router=RouterTraining(bias_update_rate=0.02)
    )
    if group == "fp16":
        scaling = LossScalingSpec(initial_loss_scale=256.0, loss_scale_window=2)
        workload = replace(workload, precision=Dtype.FP16, scaling=scaling)
    if group == "fp8":
        delayed = DelayedScalingSpec(amax_history_len=2)
        workload = replace(
            workload, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED, delayed=delayed
        )
        loads = (90, 10, 50, 20, 70, 30, 5, 60) * 2  # experts of no layer lie in order
        experts, layers = MODELS[group].expert_count, MODELS[group].moe_layer_count
        histogram = tuple(loads[layer : layer + experts] for layer in range(layers))
        workload = replace(workload, load_histogram=histogram)
    optimizer = replace(workload.optimizer, bucket_elements=4000)
    workload = replace(
        workload,
        optimizer=optimizer,
        checkpoint=replace(workload.checkpoint, every_steps=SAVED, keep=9),
        eval_batches=1,
    )
    world, text = layout.split("x ")
    return tiny_jobs.build_plan(workload, text, world_size=int(world), model=MODELS[group])


def curve_after_save(run_dir: Path) -> list[tuple[float, float, float]]:
    """Return loss, auxiliary loss and gradient norm of the steps after the save."""
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and line["step"] > SAVED]
    assert [line["step"] for line in steps] == list(range(SAVED + 1, STEPS + 1))
    return [(line["loss"], line["aux_loss"], line["grad_norm"]) for line in steps]


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(
            actual[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        ), name


@pytest.mark.parametrize("pair", mark_cases())
def test_a_run_moves_from_layout_to_layout(
    pair: Pair,
    data: DataSpec,
    uninterrupted: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = uninterrupted(pair.group, pair.source)
    middle, end = (f"checkpoints/step-{step:08d}" for step in (SAVED, STEPS))
    shutil.copytree(whole / middle, tmp_path / middle)

    def restore_and_save(
        state: TrainState,
        run_dir: Path,
        identity: Mapping[str, Any],
        comm: Coordinator,
        *,
        falls_back: bool,
        copies: PeerCopies,
        take_extra: Callable[[Mapping[str, Any]], None],
    ) -> int:
        """Save again what the ranks hold once they have loaded."""
        done = restore(
            state,
            run_dir,
            identity,
            comm,
            falls_back=falls_back,
            copies=copies,
            take_extra=take_extra,
        )
        save_checkpoint(
            run_dir / "loaded",
            step=done,
            shards=state.local_shards(),
            extra={},
            keep=1,
            comm=comm,
        )
        return done

    monkeypatch.setattr(training_loop, "restore", restore_and_save)
    assert train.train(make_plan(data, pair.group, pair.target), tmp_path) is ExitCode.DONE
    saved = read_checkpoint(whole / middle)
    assert_same_bits(read_checkpoint(tmp_path / "loaded" / f"step-{SAVED:08d}"), saved)
    assert int(saved["optim/updates"]) == SAVED
    assert saved["layers.1.moe.router.selection_bias"].abs().max() > 0.01
    if pair.source == pair.target:
        assert curve_after_save(tmp_path) == curve_after_save(whole)
        assert_same_bits(read_checkpoint(tmp_path / end), read_checkpoint(whole / end))
        return
    if pair.group == "fp8":  # a number may be rounded to another of 8 bits
        assert saved["optim/amax_history/layers.1.moe.experts.down.weight"][:, :, 0].any()
        assert (saved["optim/fp8_scale/layers.1.attention.o.weight"] != 1).all()
        return
    if pair.group == "fp16":  # activations are rounded to 11 bits: other sums, other roundings
        assert float(saved["optim/loss_scale"][0]) == 512.0
        return
    for actual, expected in zip(curve_after_save(tmp_path), curve_after_save(whole), strict=True):
        assert actual[:2] == pytest.approx(expected[:2], rel=1e-5)
        # AdamW divides small gradients by themselves.
        assert actual[2] == pytest.approx(expected[2], rel=1e-4)


def test_the_pairs_cover_what_can_be_cut() -> None:
    layouts = [
        parse_layout(text.split("x ")[1], world_size=int(text[0]))
        for pair in PAIRS
        for text in (pair.source, pair.target)
    ]
    for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp", "zero", "schedule", "stages"):
        assert len({getattr(layout, axis) for layout in layouts}) > 1, axis
    assert len(PAIRS) >= 16
