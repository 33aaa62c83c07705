"""A forward beside the backward of another micro-batch computes the same and hides exchanges."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from layout_proof import assert_equal_lines
from moewright.codec import read_json
from moewright.codec.run_files import TRACE_FOLDER
from moewright.cost.ledger import predict_ledger
from moewright.cost.time.layer_collectives import OverlapWindows
from moewright.engine.comm import autograd_collectives, collectives
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.model.attention import Attention
from moewright.engine.model.autograd import CausalAttention
from moewright.engine.model.experts import RoutedExperts
from moewright.engine.model.parallel_linear import GroupedLinear
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.ledger import Component, Ledger, Selection
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype, LossSpec, ProfileSpec
from selection import thorough

pytestmark = pytest.mark.spawn

MODEL = replace(tiny_jobs.MODEL, layers=4, moe_layers=(True, False, True, True))
assert MODEL.moe is not None
SHARED = replace(MODEL, moe=replace(MODEL.moe, shared_ffn_size=24))
AHEAD = replace(SHARED, mtp_layers=1)
SAVED = (Component.ACTIVATIONS, Component.LOGITS)


@pytest.mark.parametrize(
    ("world_size", "layout", "overlap", "model"),
    [
        thorough(2, "ep2", "ep", MODEL),
        (2, "ep2", "ep+wgrad", AHEAD),
        thorough(2, "ep2", "ep+grad+param+wgrad", SHARED),
        thorough(2, "ep2,recompute=full", "ep+wgrad", AHEAD),
        thorough(2, "ep2,recompute=uniform2", "ep", MODEL),
        thorough(2, "ep2,recompute=moe", "ep", SHARED),
        thorough(2, "ep2,recompute=moe_act+core_attn,offload=core_attn+moe_act", "ep", AHEAD),
        thorough(4, "pp2,vpp2,ep2", "ep+p2p+wgrad", MODEL),
        thorough(4, "pp2,vpp2,ep2,recompute=full,dispatcher=dedup", "ep", AHEAD),
        thorough(4, "tp2,ep4,dispatcher=dedup,ep_node2", "ep+wgrad", SHARED),
        thorough(4, "tp2,ep2,etp2,zero0", "ep", MODEL),
        thorough(4, "pp2,ep2,schedule=dualpipev,layout='E|tt|t|tL'", "ep", MODEL),
    ],
)
def test_passes_beside_each_other_compute_the_same_bits_and_keep_what_was_predicted(
    world_size: int, layout: str, overlap: str, model: ModelSpec, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(
        data, steps=2, precision=Dtype.BF16, loss=LossSpec(aux_coeff=0.01)
    )
    states = []
    for name, text in (("alone", layout), ("beside", f"{layout},overlap={overlap}")):
        plan = tiny_jobs.build_plan(workload, text, world_size=world_size, model=model)
        assert train(plan, tmp_path / name) is ExitCode.DONE
        states.append(tiny_jobs.read_state(tmp_path / name, 2))
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    if not plan.layout.schedule.splits_backward:
        _assert_ledgers(plan, tmp_path)


def _assert_ledgers(plan: Plan, folder: Path) -> None:
    """Assert that all that a rank kept at once was predicted, and that it really lived.

    Passes beside each other hold at most one pass more than passes alone, whose fullest moment may
    be the replay of a layer.
    """
    selection = read_json(Selection, folder / "beside" / "ledger" / "selection.json")
    for rank in range(plan.layout.world_size):
        name = f"ledger/rank{rank:05d}.json"
        alone = read_json(Ledger, folder / "alone" / name)
        counted = read_json(Ledger, folder / "beside" / name)
        predicted = predict_ledger(plan, rank=rank, selection=selection)
        assert_equal_lines(predicted, counted)
        kept = sum(row.bytes for row in predicted.memory)
        one_pass = sum(row.bytes for row in predicted.memory if row.component in SAVED)
        assert alone.storages is not None
        assert counted.storages is not None
        fullest = max(kept, alone.storages.peak)
        assert kept <= counted.storages.peak <= fullest + one_pass


# Seconds of a part of a layer, and of every exchange: far above what these models compute.
PARTS = OverlapWindows(
    before_s=0.03, before_backward_s=0.045, experts_s=0.03, experts_backward_s=0.05
)
EXCHANGE_S = 0.06


@dataclass(slots=True, kw_only=True)
class _SlowWork(collectives.TimedWork):
    """An exchange over a slow link that carries one at a time and needs no core of this machine."""

    ready_at: float
    blocked_s: list[float]

    def wait(self) -> bool:
        left_s = max(0.0, self.ready_at - time.perf_counter())
        time.sleep(left_s)
        self.blocked_s.append(left_s)
        return collectives.TimedWork.wait(self)


def _slow_down(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make exchanges of rows and the parts of layers take their time; ranks write the waits."""
    start = collectives.start_all_to_all
    ready_at = [0.0]
    blocked_s: list[float] = []

    def start_slowly(tensor: torch.Tensor, group: collectives.Group, **more: Any) -> Any:
        started = start(tensor, group, **more)
        is_rows = tensor.is_floating_point() and tensor.dim() == 2
        if not is_rows or started.work is None:
            return started
        ready_at.append(max(time.perf_counter(), ready_at[-1]) + EXCHANGE_S)
        work = _SlowWork(
            work=started.work.work,
            group=group,
            name="rows",
            ready_at=ready_at[-1],
            blocked_s=blocked_s,
        )
        return replace(started, work=work)

    def slow(target: Any, name: str, seconds: float) -> None:
        function = getattr(target, name)

        def slowly(*args: Any, **more: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **more)

        is_static = isinstance(target.__dict__[name], staticmethod)
        patch.setattr(target, name, staticmethod(slowly) if is_static else slowly)

    run_pair = PassTurns.run_pair

    def run_and_write(
        self: PassTurns, forward: Any, backward: Any, order: Any, note: Callable[..., None]
    ) -> None:
        blocked_s.clear()
        segments_s: list[float] = []
        started = [time.perf_counter(), 0.0]

        def note_and_time(kind: RowKind | None) -> None:
            note(kind)
            now = [time.perf_counter(), sum(blocked_s)]
            segments_s.append(now[0] - started[0] - (now[1] - started[1]))
            started[:] = now

        run_pair(self, forward, backward, order, note_and_time)
        with (folder / "pairs").open("a") as file:
            file.write(json.dumps([blocked_s, segments_s[1:]]) + "\n")

    patch.setattr(autograd_collectives, "start_all_to_all", start_slowly)
    patch.setattr(PassTurns, "run_pair", run_and_write)
    slow(Attention, "forward", PARTS.before_s)
    slow(CausalAttention, "backward", PARTS.before_backward_s)
    slow(RoutedExperts, "forward", PARTS.experts_s)
    slow(GroupedLinear, "backward", PARTS.experts_backward_s / 2)  # two products


def test_the_share_of_slow_exchanges_that_hides_is_the_planner_s(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slow_down(monkeypatch, tmp_path)
    model = replace(MODEL, layers=2, moe_layers=(True, True))
    workload = tiny_jobs.build_workload(data, steps=1)
    plan = tiny_jobs.build_plan(workload, "ep2,overlap=ep", world_size=2, model=model)
    assert train(plan, tmp_path / "run") is ExitCode.DONE
    pairs = [json.loads(line) for line in (tmp_path / "pairs").read_text().splitlines()]
    assert len(pairs) == 2 * 3  # ranks, and all but the first forward and the last backward
    assert {len(blocked) for blocked, _ in pairs} == {4 * model.layers}
    exchanged_s = 4 * model.layers * EXCHANGE_S
    hidden = sum(1 - sum(blocked) / exchanged_s for blocked, _ in pairs) / len(pairs)
    # The seconds of the segments as this machine ran them, by turns from the backward's first.
    measured = torch.tensor([segments for _, segments in pairs]).mean(0).tolist()
    backward, forward = measured[::2], measured[1::2]
    parts = OverlapWindows(
        before_s=forward[2],
        experts_s=(forward[1] + forward[3]) / 2,
        before_backward_s=backward[2],
        experts_backward_s=(backward[1] + backward[3]) / 2,
    )
    assert parts.before_s >= PARTS.before_s
    assert parts.before_backward_s >= PARTS.before_backward_s
    covered = parts.cover(EXCHANGE_S, EXCHANGE_S, delayed_s=0.0, delayed_experts_s=0.0)
    predicted = (covered.forward_s + covered.backward_s) / (4 * EXCHANGE_S)
    print(f"hidden {hidden:.3f}, predicted {predicted:.3f}, parts {parts}")
    assert hidden == pytest.approx(predicted, abs=0.1)


@pytest.mark.thorough
def test_a_profile_sees_both_passes(data: DataSpec, tmp_path: Path) -> None:
    profile = ProfileSpec(start=1, end=2, ranks=(0,))
    workload = tiny_jobs.build_workload(data, steps=1, profile=profile)
    plan = tiny_jobs.build_plan(workload, "ep2,mbs2,overlap=ep", world_size=2)
    assert train(plan, tmp_path) is ExitCode.DONE
    trace = tmp_path / TRACE_FOLDER / "rank00000.json"
    events = json.loads(trace.read_text())["traceEvents"]
    backwards = [event for event in events if event.get("name") == "CausalAttentionBackward"]
    assert len(backwards) == 2 * tiny_jobs.MODEL.layers  # two micro-batches


def test_a_failure_of_one_pass_ends_the_other() -> None:
    turns = PassTurns(torch.device("cpu"), ())
    ended: list[str] = []

    def fail() -> None:
        turns.pass_turn()
        raise ValueError("a bad row")

    def go_on() -> None:
        try:
            turns.pass_turn()
        finally:
            ended.append("other")

    order = (RowKind.B, RowKind.F, RowKind.B, RowKind.F)
    for forward, backward in ((fail, go_on), (go_on, fail)):
        with pytest.raises(ValueError, match="a bad row"):
            turns.run_pair(forward, backward, order)
    assert ended == ["other", "other"]
    assert not turns.is_pair


@pytest.mark.parametrize("calls", [0, 2])
def test_a_pass_with_other_segments_than_the_timetable_is_no_hang(calls: int) -> None:
    turns = PassTurns(torch.device("cpu"), ())

    def run(count: int) -> Callable[[], None]:
        def run_pass() -> None:
            for _ in range(count):
                turns.pass_turn()

        return run_pass

    with pytest.raises(RuntimeError, match="its last segment"):
        turns.run_pair(run(calls), run(1), (RowKind.B, RowKind.F, RowKind.B, RowKind.F))


def test_a_backward_that_waits_keeps_no_other_of_its_device_from_going_on() -> None:
    """On a card, all that goes backward shares a thread, unless each runs where it is called.

    The forward of the pair asks for gradients while the backward waits for its turn.
    """
    program = Path(__file__).parents[1] / "stand_in_card.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
    )
    alone, pair = (line.split() for line in done.stdout.splitlines())
    assert alone[0] != "MainThread"  # the card has a thread of its own
    assert alone[1:] == ["2.0"] * 3
    assert pair == ["backward"] * 3 + ["MainThread"] * 3 + ["8.0"] * 3
