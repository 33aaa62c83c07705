"""Processes that measure at once, so that what they contend for is in the numbers.

Memory bandwidth above all is shared by the ranks of a machine.
"""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import zip_longest
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from moewright.bench.case import BenchContext, Call, Case, Probe
from moewright.bench.collective_cases import build_collective_cases, build_link_cases, group_sizes
from moewright.bench.compute_cases import build_compute_cases
from moewright.codec.processes import die_with_parent
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.run.early_checks import count_cores
from moewright.spec.hardware import DeviceKind


def build_cases(kind: DeviceKind, ranks: int) -> tuple[Case, ...]:
    """Build every case for a machine of so many ranks, the indispensable ones first.

    First comes what a hardware file cannot be without: launches, tiny steps, the smallest point of
    each curve. Then come all of the collectives, then the other rates by rounds. When time runs
    out, what is missing are the largest points of the rates.
    """
    curves: dict[tuple[str, str, int], list[Case]] = {}
    for case in _all_cases(kind, ranks):
        curves.setdefault(case.curve_key, []).append(case)
    indispensable: list[Case] = []
    communication: list[Case] = []
    rates: list[list[Case]] = []
    for cases in curves.values():
        curve = sorted(cases, key=lambda case: case.x)
        needed = _count_indispensable(curve)
        indispensable += curve[:needed]
        if curve[0].is_communication:
            communication += curve[needed:]
        else:
            rates.append(curve[needed:])
    rounds = zip_longest(*rates)
    return (
        *indispensable,
        *communication,
        *(case for cases in rounds for case in cases if case is not None),
    )


def _all_cases(kind: DeviceKind, ranks: int) -> Iterator[Case]:
    yield from build_compute_cases(kind)
    yield from build_collective_cases(ranks)
    yield from build_link_cases(ranks)


def _count_indispensable(curve: Sequence[Case]) -> int:
    """Return how many of a curve's first points must be measured."""
    if curve[0].op is Probe.STEP:
        return len(curve)
    # A launch says nothing alone: the first point that works must be measured as well.
    return 1 if curve[0].work else 2


# Time spent on one case, when the budget allows.
SLICE_S = 0.2
# Calls shorter than this are timed several at once.
BATCH_S = 2e-4
# Time after the budget at which workers that still run are taken to hang.
GRACE_S = 60.0
_MAX_CALLS = 1000
_MIN_REPEATS = 2
_MAX_REPEATS = 60


class CallClock(StrEnum):
    """The clock that work other than communication is timed by."""

    WALL = "wall"
    # CPU time of the calling thread: what other jobs take from the machine is not in it.
    THREAD = "thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The settings that every worker is started with."""

    kind: DeviceKind
    ranks: int
    clock: CallClock
    deadline: float  # of the monotonic clock, which processes share
    folder: str


def choose_clock(kind: DeviceKind, ranks: int) -> CallClock:
    """Return the clock for so many ranks on this machine.

    Ranks that have a core each are timed by their CPU time. Ranks that share cores wait for each
    other, and so only the wall clock tells what they take.
    """
    if kind is DeviceKind.CPU and ranks <= count_cores():
        return CallClock.THREAD
    return CallClock.WALL


def run_workers(
    kind: DeviceKind, *, ranks: int, budget_s: float
) -> tuple[tuple[float, ...] | None, ...]:
    """Return the seconds of one call of each case on every rank; None where no time was left.

    The cases are those of `build_cases`. Ranks are forked on a CPU (with one thread each) and
    started anew for CUDA, which does not survive a fork.

    Raises:
        RuntimeError: A rank failed or hung.
    """
    is_cpu = kind is DeviceKind.CPU
    fork = multiprocessing.get_context("fork")
    spawn = multiprocessing.get_context("spawn")
    make_process = fork.Process if is_cpu else spawn.Process
    deadline = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="moewright-bench-") as folder:
        settings = WorkerSettings(
            kind=kind,
            ranks=ranks,
            clock=choose_clock(kind, ranks),
            deadline=deadline,
            folder=folder,
        )
        workers: list[BaseProcess] = [
            make_process(target=_run_worker, args=(rank, settings, os.getpid()), daemon=True)
            for rank in range(ranks)
        ]
        codes = _wait_for_workers(workers, deadline + GRACE_S)
        _raise_first_failure(codes, Path(folder))
        seconds = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    by_case = zip(*seconds, strict=True)
    return tuple(None if None in times else times for times in by_case)


def _wait_for_workers(workers: Sequence[BaseProcess], deadline: float) -> list[int | None]:
    """Start the workers and return their exit codes; None for one that did not end in time.

    When one fails, the others are not waited for. None is left running.
    """
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            has_failed = any(worker.exitcode for worker in workers)
            if has_failed or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _raise_first_failure(codes: Sequence[int | None], folder: Path) -> None:
    """Raise for the rank that failed first; the others fail in its wake, as connections close."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            raise RuntimeError(f"rank {rank} of the benchmark was killed by signal {-code}")
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        first = errors[0]
        raise RuntimeError(f"rank {first.stem} of the benchmark failed:\n{first.read_text()}")
    hanging = [rank for rank, code in enumerate(codes) if code is None]
    if hanging:
        raise RuntimeError(f"ranks {hanging} of the benchmark hung: {GRACE_S:g} s past its budget")


def _run_worker(rank: int, settings: WorkerSettings, parent: int) -> None:
    """Measure all cases on one rank, and leave the seconds, or the error, in the folder."""
    folder = Path(settings.folder)
    try:
        # A parent that is killed cannot end its daemons.
        if sys.platform == "linux":
            die_with_parent(parent)
        seconds = _measure_all(rank, settings)
        (folder / f"{rank}.json").write_text(json.dumps(seconds))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def _measure_all(rank: int, settings: WorkerSettings) -> Sequence[float | None]:
    torch.set_num_threads(1)
    keep_freed_memory()
    # torch 2.13 warns that collectives have new names, which 2.11 does not have yet.
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(rank)
    is_cuda = settings.kind is DeviceKind.CUDA
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    if settings.ranks > 1:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=Path(settings.folder, "store").as_uri(),
            rank=rank,
            world_size=settings.ranks,
            timeout=timedelta(seconds=GRACE_S),
        )
    groups = {size: _new_group(rank, size, settings.ranks) for size in group_sizes(settings.ranks)}
    context = BenchContext(device=device, rank=rank, groups=groups)
    cases = build_cases(settings.kind, settings.ranks)
    seconds = [
        _measure_case(case, context, settings, len(cases) - number)
        for number, case in enumerate(cases)
    ]
    if settings.ranks > 1:
        dist.destroy_process_group()
    return seconds


def _new_group(rank: int, size: int, ranks: int) -> dist.ProcessGroup | None:
    """Return this rank's group of `size` neighbours; None is the world.

    Every rank creates the groups of all ranks, in the same order.
    """
    if size == ranks:
        return None
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return groups[rank // size]


def _measure_case(
    case: Case, context: BenchContext, settings: WorkerSettings, cases_left: int
) -> float | None:
    """Return the seconds of one call; None when no time is left.

    Every rank makes the same number of calls, at the same time as the others. The result is the
    lower quartile of the repeats: the ranks slow each other down in all repeats, other jobs on the
    machine mostly in the slower ones.
    """
    device = context.device
    # The least time that any rank has left: all ranks must decide alike.
    left_s = -_max_over_ranks(time.monotonic() - settings.deadline, device, settings.ranks)
    if left_s <= 0:
        return None
    calls_by_set = itertools.cycle([case.setup(context) for _ in range(case.input_sets)])

    def call() -> object:
        return next(calls_by_set)()

    call()  # warms up
    clock = CallClock.WALL if case.is_communication else settings.clock
    first = _time_calls(call, 1, device, clock)
    wall_s = max(_max_over_ranks(first.wall_s, device, settings.ranks), 1e-7)
    calls = max(1, min(_MAX_CALLS, round(BATCH_S / wall_s)))
    slice_s = case.time_slices * min(SLICE_S, left_s / cases_left)
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(slice_s / (wall_s * calls))))
    timings = [first, *(_time_calls(call, calls, device, clock) for _ in range(repeats))]
    return sorted(timing.call_s for timing in timings)[len(timings) // 4]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTiming:
    """The seconds of one call by the wall clock, and by the clock that was asked for."""

    wall_s: float
    call_s: float


def _time_calls(call: Call, calls: int, device: torch.device, clock: CallClock) -> CallTiming:
    """Return the mean times of so many calls."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall_started = time.perf_counter()
    thread_started = time.thread_time()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    thread_s = (time.thread_time() - thread_started) / calls
    wall_s = (time.perf_counter() - wall_started) / calls
    return CallTiming(wall_s=wall_s, call_s=thread_s if clock is CallClock.THREAD else wall_s)


def _max_over_ranks(value: float, device: torch.device, ranks: int) -> float:
    """Return the largest value of any rank, on every rank; the ranks wait for each other here."""
    if ranks == 1:
        return value
    largest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
