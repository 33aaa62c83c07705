"""Twenty changes of runs on a CPU: what a trace says of each, beside the run with the change.

`python tests/what_if/pairs.py [FIRST [LAST]]` prints a table and ends with 1 where a step is more
than 10 % off, or an unchanged replay more than 1 %. Products, host work and links of these runs
sleep for a time that is planted, so that a busy machine decides little; all else is the engine's:
its order of work, its waits, its timetables. A collective takes its link from when the last rank
has come to it, as on a network. Steps with and without a change of speed alternate in one run; runs
of two layouts alternate. Figures are medians of steps without the first that is traced, in which
a rank whose profiler starts later keeps others waiting. Where steps alternate, what is off is the
median of neighbours, which have had the same machine. `again` is how far two halves of the
unchanged steps are apart: what the machine decides by itself.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tiny_jobs
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.rank_replay import RankGraph
from moewright.diagnosis.traces.run_what_if import replay_run
from moewright.diagnosis.traces.trace_changes import parse_change
from moewright.diagnosis.traces.trace_files import read_captures
from moewright.engine.comm import collectives
from moewright.engine.model import layer
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.job import Job
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DataSpec,
    OptimizerSpec,
    ProfileSpec,
    RouterForce,
    RouterTraining,
)

GRADIENT_GROUPS = ("dp_cp", "edp")
FIRST = 4  # the first step that is traced
STEPS = 12  # of a run with two speeds, half of them changed
LAYOUT_STEPS = 5  # of each run of two layouts
TURNS = 2  # runs of each layout
SHALLOW = replace(tiny_jobs.MODEL, layers=2, moe_layers=(True, True))
DEEP = replace(tiny_jobs.MODEL, layers=4, moe_layers=(True,) * 4)

library = torch.library.Library("planted", "FRAGMENT")
library.define("gemm(Tensor rows, float seconds) -> Tensor")


def sleeping_gemm(rows: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return rows.clone()


library.impl("gemm", sleeping_gemm, "CPU")


class SlowProduct(torch.autograd.Function):
    """A product that takes its seconds forward, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        product: torch.Tensor = torch.ops.planted.gemm(rows, seconds)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.planted.gemm(grads[0], 2 * ctx.seconds), None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a layer's product and host work take, the more on the last rank, and what links carry.

    Groups that exchange gradients share the link `gradients_Bps`; 0: as fast as the machine.
    """

    product_s: float = 0.04
    host_s: float = 0.02
    skew: float = 1.0
    experts_Bps: float = 0.0
    gradients_Bps: float = 0.0

    def link_of(self, group: str) -> tuple[str, float]:
        """Return the link that a group's bytes take, and its rate."""
        if group in GRADIENT_GROUPS:
            return "gradients", self.gradients_Bps
        return group, self.experts_Bps if group == "ep" else 0.0


class Planting:
    """Products, host work and links that sleep, in the odd and the even steps of a run.

    Layers count the steps of a rank by how often they are called.
    """

    def __init__(self, speeds: tuple[Speed, Speed], calls_per_step: int) -> None:
        self._speeds = speeds
        self._calls_per_step = calls_per_step
        self._calls = 0
        self._links: dict[str, SharedLink] = {}
        self._begins = ArrivalBoard()

    def _speed(self, calls: int) -> Speed:
        return self._speeds[calls // self._calls_per_step % 2]

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        original = layer.TransformerLayer.forward

        def forward(module: Any, decisions: Any, context: Any, hidden: Any) -> Any:
            is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
            speed = self._speed(self._calls)
            self._calls += 1
            if speed.host_s:
                time.sleep(speed.host_s)
            seconds = speed.product_s * (speed.skew if is_last else 1.0)
            return original(module, decisions, context, SlowProduct.apply(hidden, seconds))

        patch.setattr(layer.TransformerLayer, "forward", forward)
        start: Callable[..., Any] = collectives._start

        def start_slowly(name: str, group: Any, *args: Any, **options: Any) -> Any:
            name_of_link, rate = self._speed(max(0, self._calls - 1)).link_of(group.name)
            place = self._begins.note(group.name, dist.get_rank()) if rate else 0
            transfer = start(name, group, *args, **options)
            if rate:
                link = self._links.setdefault(name_of_link, SharedLink(self._begins))
                nbytes = args[-1].numel() * args[-1].element_size() * link_share(name, group.size)
                link.calls.append((place, group.ranks, nbytes / rate))
                transfer.work = SlowWork(transfer.work, link, place)
            return transfer

        patch.setattr(collectives, "_start", start_slowly)


def link_share(name: str, ranks: int) -> float:
    """Return the bytes that cross a rank's link for each that it hands in, in a ring."""
    if name == "all_gather":
        return ranks - 1.0
    return (1 - 1 / ranks) * (2.0 if name == "all_reduce" else 1.0)


class ArrivalBoard:
    """When ranks came to the calls of a group: memory that forked processes share."""

    CALLS = 8192
    GROUPS = ("ep", *GRADIENT_GROUPS)
    RANKS = 4

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 8 * len(self.GROUPS) * self.CALLS * self.RANKS)
        self._times = np.frombuffer(memory).reshape(-1, self.RANKS)
        self._counts = dict.fromkeys(self.GROUPS, 0)

    def note(self, group: str, rank: int) -> int:
        """Note that a rank comes to its next call of a group; return the call's place."""
        place = self.GROUPS.index(group) * self.CALLS + self._counts[group]
        self._counts[group] += 1
        self._times[place, rank] = time.monotonic()
        return place

    def last(self, place: int, ranks: Sequence[int]) -> float:
        return float(self._times[place, list(ranks)].max())


class SharedLink:
    """The calls that are under way on a link, each with its seconds, in the order of begins."""

    def __init__(self, board: ArrivalBoard) -> None:
        self._board = board
        self.calls: list[tuple[int, Sequence[int], float]] = []
        self._free_s = 0.0
        self._ends: dict[int, float] = {}

    def finish(self, place: int) -> float:
        """Return when a call is over, all of whose ranks have come: behind those before it."""
        while place not in self._ends:
            at, ranks, seconds = self.calls.pop(0)
            self._free_s = max(self._free_s, self._board.last(at, ranks)) + seconds
            self._ends[at] = self._free_s
        return self._ends.pop(place)


class SlowWork:
    """A call of torch's that is over when its link is."""

    def __init__(self, work: Any, link: SharedLink, place: int) -> None:
        self._work, self._link, self._place = work, link, place

    def wait(self) -> bool:
        is_done = bool(self._work.wait())
        time.sleep(max(0.0, self._link.finish(self._place) - time.monotonic()))
        return is_done


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A change in the words of `--what-if`, and the run that has it."""

    change: str
    layout: str
    other: str = ""  # the layout with the change; "": the same
    world: int = 2
    model: ModelSpec = SHALLOW
    bucket_elements: int = 1_000_000  # of gradients
    before: Speed = Speed()
    after: Speed = Speed()


EP = 1e5
DP = 4e5
HALF = Speed(product_s=0.02)
PIPE = "pp2,vpp2,mbs1"
PAIRS = (
    Pair(change="gemm=2x", layout="mbs4", world=1, after=HALF),
    Pair(change="gemm=4x", layout="mbs4", world=1, after=Speed(product_s=0.01)),
    # The host's own work is halved by the change too, and is not by the run: little of all.
    Pair(
        change="host=2x",
        layout="mbs8",
        world=1,
        before=Speed(host_s=0.4),
        after=Speed(host_s=0.2),
    ),
    Pair(
        change="gemm=2x,host=2x",
        layout="mbs8",
        world=1,
        before=Speed(product_s=0.1, host_s=0.4),
        after=Speed(product_s=0.05, host_s=0.2),
    ),
    # Graphs of a CPU are lists of operations with work of their own: they show nothing of a GPU's.
    Pair(change="gemm=2x", layout="tp2,mbs4", after=HALF),
    Pair(
        change="gemm=2x,host=2x",
        layout="ep2,mbs4",
        before=Speed(host_s=0.4),
        after=Speed(product_s=0.02, host_s=0.2),
    ),
    Pair(change="gemm=2x", layout="ep2,mbs2", after=HALF),
    Pair(
        change="gemm=2x",
        layout="ep2,mbs2",
        before=Speed(skew=2.0),
        after=Speed(product_s=0.02, skew=2.0),
    ),
    Pair(
        change="network=2x",
        layout="ep2,mbs4",
        before=Speed(experts_Bps=EP),
        after=Speed(experts_Bps=2 * EP),
    ),
    Pair(
        change="network=4x",
        layout="ep2,mbs2",
        before=Speed(experts_Bps=EP, skew=1.5),
        after=Speed(experts_Bps=4 * EP, skew=1.5),
    ),
    Pair(
        change="network=2x,gemm=2x",
        layout="ep2,mbs4",
        before=Speed(experts_Bps=EP),
        after=Speed(experts_Bps=2 * EP, product_s=0.02),
    ),
    Pair(
        change="network=2x",
        layout="mbs4",
        before=Speed(gradients_Bps=DP),
        after=Speed(gradients_Bps=2 * DP),
    ),
    Pair(
        change="overlap=grad",
        layout="mbs4",
        other="mbs4,overlap=grad",
        before=Speed(gradients_Bps=DP),
        after=Speed(gradients_Bps=DP),
    ),
    Pair(
        change="overlap=grad,network=2x",
        bucket_elements=10_000,
        layout="mbs4",
        other="mbs4,overlap=grad",
        before=Speed(gradients_Bps=DP),
        after=Speed(gradients_Bps=2 * DP),
    ),
    Pair(
        change="ep=1",
        layout="ep2,mbs4",
        other="mbs4",
        before=Speed(experts_Bps=EP, gradients_Bps=DP),
        after=Speed(experts_Bps=EP, gradients_Bps=DP),
    ),
    Pair(
        change="ep=2",
        layout="ep4,mbs2",
        other="ep2,mbs2",
        world=4,
        before=Speed(experts_Bps=EP, gradients_Bps=DP),
        after=Speed(experts_Bps=EP, gradients_Bps=DP),
    ),
    Pair(change="gemm=2x", layout="pp2,mbs2", model=DEEP, after=HALF),
    Pair(change="schedule=1f1b", layout=PIPE, other="pp2,mbs1", model=DEEP),
    # The way back is refused: a trace does not tell the two parts of a backward.
    Pair(change="schedule=1f1b", layout=f"{PIPE},schedule=gis", other="pp2,mbs1", model=DEEP),
    Pair(
        change="gemm=2x",
        layout="pp2,mbs2",
        model=DEEP,
        before=Speed(skew=2.0),
        after=Speed(product_s=0.02, skew=2.0),
    ),
)


@dataclass(frozen=True)
class TracedRun:
    """The plan and the traces of a run."""

    plan: Plan
    captures: Sequence[Capture]

    def cut(self, step: int) -> list[Capture]:
        """Return the traces of one of the marked steps."""
        return [replace(capture, steps=capture.steps[step : step + 1]) for capture in self.captures]

    def measure(self, step: int) -> float:
        return RankGraph(self.cut(step), self.plan.layout).measured_s


def train_planted(
    pair: Pair, layout: str, speeds: tuple[Speed, Speed], steps: int, data: DataSpec
) -> TracedRun:
    """Train with speeds that are planted in the steps of odd and of even number."""
    end = FIRST + steps
    profile = ProfileSpec(start=FIRST, end=end, ranks=tuple(range(pair.world)))
    workload = tiny_jobs.build_workload(
        data,
        steps=end,
        profile=profile,
        router=RouterTraining(force=RouterForce.BALANCED),
        optimizer=OptimizerSpec(lr=1e-2, clip_norm=0.0, bucket_elements=pair.bucket_elements),
    )
    plan = tiny_jobs.build_plan(workload, layout, world_size=pair.world, model=pair.model)
    job = Job(model=plan.model, workload=plan.workload, layout=plan.layout)
    calls = pair.model.layers // plan.layout.pp * job.micro_batches
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Planting(speeds, calls).plant(patch)
        with contextlib.redirect_stdout(io.StringIO()):
            code = train(plan, Path(folder))
        if code is not ExitCode.DONE:
            raise SystemExit(f"{layout}: the run ended with {code}")
        return TracedRun(plan, read_captures(Path(folder) / "trace"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Medians of steps: before the change, what the traces say, and what was run."""

    before_s: float
    predicted_s: float
    measured_s: float
    error: float
    replay_error: float
    again: float

    @property
    def is_good(self) -> bool:
        return abs(self.error) <= 0.1 and self.replay_error <= 0.01


def run_pair(pair: Pair, data: DataSpec) -> Outcome:
    """Run a pair, and replay each traced step before the change with it."""
    change = parse_change(pair.change)
    before: list[tuple[TracedRun, int]] = []
    after: list[tuple[TracedRun, int]] = []
    if pair.other:
        for _ in range(TURNS):
            for steps, layout, speed in (
                (before, pair.layout, pair.before),
                (after, pair.other, pair.after),
            ):
                run = train_planted(pair, layout, (speed, speed), LAYOUT_STEPS, data)
                steps += [(run, step) for step in range(1, LAYOUT_STEPS)]
    else:
        run = train_planted(pair, pair.layout, (pair.after, pair.before), STEPS, data)
        # The first traced step has an even number: it is the second of a pair of speeds.
        before += [(run, step) for step in range(2, STEPS, 2)]
        after += [(run, step) for step in range(3, STEPS, 2)]
    replays = [replay_run(run.cut(step), run.plan, change) for run, step in before]
    measured_s = [run.measure(step) for run, step in after]
    error = median(replay.low_s for replay in replays) / median(measured_s) - 1
    if not pair.other:
        ratios = (replay.low_s / s for replay, s in zip(replays, measured_s, strict=True))
        error = median(ratios) - 1
    return Outcome(
        error=error,
        before_s=median(replay.measured_s for replay in replays),
        again=median(replay.measured_s for replay in replays[::2])
        / median(replay.measured_s for replay in replays[1::2])
        - 1,
        predicted_s=median(replay.low_s for replay in replays),
        measured_s=median(measured_s),
        replay_error=max(abs(replay.replayed_s / replay.measured_s - 1) for replay in replays),
    )


def main(arguments: Sequence[str]) -> int:
    first = int(arguments[0]) if arguments else 1
    last = int(arguments[1]) if len(arguments) > 1 else len(PAIRS)
    outcomes = []
    head = "| change | layout | before | predicted | measured | off | unchanged replay | again |"
    print(head + "\n" + "|---" * 8 + "|", flush=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with tempfile.TemporaryDirectory() as folder:
        data = tiny_jobs.write_corpus(Path(folder))
        for pair in PAIRS[first - 1 : last]:
            outcome = run_pair(pair, data)
            outcomes.append(outcome)
            layouts = f"{pair.layout} -> {pair.other}" if pair.other else pair.layout
            print(
                f"| `{pair.change}` | {layouts} | {outcome.before_s * 1e3:.0f} ms "
                f"| {outcome.predicted_s * 1e3:.0f} ms | {outcome.measured_s * 1e3:.0f} ms "
                f"| {outcome.error:+.1%} | {outcome.replay_error:.2%} | {outcome.again:+.1%} |",
                flush=True,
            )
    good = sum(outcome.is_good for outcome in outcomes)
    print(f"{good} of {len(outcomes)} within 10 %, replayed unchanged within 1 %")
    return int(good < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
