"""Processes that measure at once, so that what they contend for, memory bandwidth above all, is in
the numbers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist

from moewright.bench.cases import BenchContext, Call, Case, build_cases, group_sizes
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.run.process_limit import count_cores
from moewright.engine.run.worker import die_with_parent
from moewright.spec.hardware import DeviceKind

SLICE_S = 0.2  # on one case, when the budget allows
BATCH_S = 2e-4  # calls shorter than this are timed several at once
GRACE_S = 60.0  # past the budget, before a team is taken for hung


class CallClock(StrEnum):
    WALL = "wall"
    # CPU time of the calling thread: what other jobs take from the machine is not in it
    THREAD = "thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a rank of the team is told; the deadline is of the monotonic clock, which processes
    share."""

    kind: DeviceKind
    ranks: int
    clock: CallClock  # of work other than collectives
    deadline: float
    folder: str


def choose_clock(kind: DeviceKind, ranks: int) -> CallClock:
    """Ranks that have a core each are timed by their CPU time; ranks that share cores must wait for
    each other."""
    return CallClock.THREAD if kind is DeviceKind.CPU and ranks <= count_cores() else CallClock.WALL


def run_workers(
    kind: DeviceKind, *, ranks: int, budget_s: float
) -> tuple[tuple[float, ...] | None, ...]:
    """Seconds of one call of each of `all_cases` on every rank; None: no time was left.

    Ranks are forked on a CPU (with one thread each) and started anew for CUDA, which does not
    survive a fork.
    """
    start = (
        multiprocessing.get_context("fork")
        if kind is DeviceKind.CPU
        else multiprocessing.get_context("spawn")
    )
    deadline = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="moewright-bench-") as folder:
        told = WorkerSettings(
            kind=kind,
            ranks=ranks,
            clock=choose_clock(kind, ranks),
            deadline=deadline,
            folder=folder,
        )
        arguments = [(rank, told, os.getpid()) for rank in range(ranks)]
        team = [start.Process(target=_rank_main, args=each, daemon=True) for each in arguments]
        try:
            for process in team:
                process.start()
            while any(process.is_alive() for process in team):
                if (
                    any(process.exitcode for process in team)
                    or time.monotonic() > deadline + GRACE_S
                ):
                    break
                time.sleep(0.02)
            codes = [process.exitcode for process in team]
        finally:
            for process in team:
                if process.is_alive():
                    process.kill()
                process.join()
        _raise_first_failure(codes, Path(folder))
        taken = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return tuple(None if None in times else times for times in zip(*taken, strict=True))


def _raise_first_failure(codes: Sequence[int | None], folder: Path) -> None:
    """Name the rank that failed first; the others fail in its wake, with a closed connection."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            raise RuntimeError(f"rank {rank} of the benchmark was killed by signal {-code}")
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise RuntimeError(
            f"rank {errors[0].stem} of the benchmark failed:\n{errors[0].read_text()}"
        )
    hung = [rank for rank, code in enumerate(codes) if code is None]
    if hung:
        raise RuntimeError(f"ranks {hung} of the benchmark hung: {GRACE_S:g} s past its budget")


def _rank_main(rank: int, told: WorkerSettings, parent: int) -> None:
    folder = Path(told.folder)
    try:
        if sys.platform == "linux":  # a parent that is killed cannot end its daemons
            die_with_parent(parent)
        seconds = _measure_all(rank, told)
        (folder / f"{rank}.json").write_text(json.dumps(seconds))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def _measure_all(rank: int, told: WorkerSettings) -> Sequence[float | None]:
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # torch 2.13 renames collectives that 2.11 does not have yet
    torch.manual_seed(rank)
    cuda = told.kind is DeviceKind.CUDA
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if told.ranks > 1:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=Path(told.folder, "store").as_uri(),
            rank=rank,
            world_size=told.ranks,
            timeout=timedelta(seconds=GRACE_S),
        )
    cases = build_cases(told.kind, told.ranks)
    place = BenchContext(
        device=device,
        rank=rank,
        groups={size: _block(rank, size, told.ranks) for size in group_sizes(told.ranks)},
    )
    taken = [_measure(case, place, told, len(cases) - number) for number, case in enumerate(cases)]
    if told.ranks > 1:
        dist.destroy_process_group()
    return taken


def _block(rank: int, size: int, ranks: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` neighbours; None is the world. Every rank makes them all, in the
    same order."""
    if size == ranks:
        return None
    blocks = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return blocks[rank // size]


def _measure(
    case: Case, place: BenchContext, told: WorkerSettings, cases_left: int
) -> float | None:
    """Seconds of one call. Every rank makes the same number of calls, at the same time as the
    others.

    The lower quartile of the repeats: what the team's own ranks cost each other is in all of them,
    what other jobs on the machine cost is mostly in the upper ones.
    """
    device = place.device
    left_s = -_highest(time.monotonic() - told.deadline, device, told.ranks)
    if left_s <= 0:
        return None
    turns = itertools.cycle([case.setup(place) for _ in range(case.input_sets)])

    def call() -> object:
        return next(turns)()

    call()
    clock = CallClock.WALL if case.is_communication else told.clock
    first = _time(call, 1, device, clock)
    wall_s = max(_highest(first.wall_s, device, told.ranks), 1e-7)
    calls = max(1, min(1000, round(BATCH_S / wall_s)))
    repeats = int(case.time_slices * min(SLICE_S, left_s / cases_left) / (wall_s * calls))
    times = [first, *(_time(call, calls, device, clock) for _ in range(max(2, min(60, repeats))))]
    return sorted(timing.call_s for timing in times)[len(times) // 4]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTiming:
    """One call, by the wall clock and by the clock asked for."""

    wall_s: float
    call_s: float


def _time(call: Call, calls: int, device: torch.device, clock: CallClock) -> CallTiming:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, thread = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    thread_s, wall_s = (time.thread_time() - thread) / calls, (time.perf_counter() - wall) / calls
    return CallTiming(wall_s=wall_s, call_s=thread_s if clock is CallClock.THREAD else wall_s)


def _highest(value: float, device: torch.device, ranks: int) -> float:
    """The highest value of any rank, on every rank; it also lines the ranks up."""
    if ranks == 1:
        return value
    agreed = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return float(agreed)
