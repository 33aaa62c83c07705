"""The cost of the engine beside a plain PyTorch loop, and the gain of overlapped collectives.

Engine and loop train the same modules on the same tokens in fp32, in one process with no feature
on, step by step in turn, so that other work of the machine slows both. The plain loop is what one
would write without the engine: forward, backward, gradients accumulated by autograd, a clipped
norm, torch's fused AdamW.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.workloads import QUICKSTART_MODEL as MODEL
from benchmarks.workloads import QUICKSTART_WORKLOAD as WORKLOAD
from moewright.engine.checkpoint import CheckpointSaver
from moewright.engine.comm import collectives
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import (
    build_coordinator,
    build_train_state,
    init_distributed,
)
from moewright.engine.run.launch import launch
from moewright.engine.run.step import train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Overlap
from moewright.spec.workload import CheckpointSpec, SaveMode

WARM_UP = 3
REPEATS = 15
PROFILED = 3
SAVES = 7  # pairs of which the cost of a save is the median
STEPS_A_SAVE = 10
LAYOUT = Layout(world_size=1, mbs=2)
_MICRO_BATCHES = WORKLOAD.global_batch // LAYOUT.mbs

# Trains on the batch of a step, numbered from 1, and returns the loss.
TrainStep = Callable[[int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """The times of engine and plain loop, medians over REPEATS pairs of steps.

    The `outside` times are what the host spends in a step outside of torch's operations.
    """

    engine_s: float
    plain_s: float
    ratio: float  # tokens/s of the engine over the plain loop's, median of pairs
    engine_outside_s: float
    plain_outside_s: float
    losses: tuple[float, float]  # of the last step, engine and plain: the two trained the same


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTokens:
    """A source of random batches that are the same for both loops."""

    device: torch.device

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        """Return the rank's part of a micro-batch, drawn from its number, step and rank."""
        seed = (step * 1000 + micro_batch) * 1000 + run.mesh.rank
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYOUT.mbs, WORKLOAD.seq_len + 1)
        tokens = torch.randint(0, MODEL.vocab_size, shape, generator=generator).to(self.device)
        return build_micro_batch(run, tokens[:, :-1], tokens[:, 1:], None)


def measure_overhead(device: torch.device) -> Overhead:
    """Time the engine and the plain loop in turn.

    On a CPU one thread runs, and its own time counts: what other jobs take is not in it.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    engine_state = build_state(device)
    plain_state = build_state(device)
    engine = _engine_step(engine_state)
    plain = _plain_step(plain_state)
    pairs = []
    losses = (0.0, 0.0)
    for step in range(1, WARM_UP + REPEATS + 1):
        engine_s, engine_loss = _time_step(engine, step, device)
        plain_s, plain_loss = _time_step(plain, step, device)
        losses = (engine_loss, plain_loss)
        if step > WARM_UP:
            pairs.append((engine_s, plain_s))
    next_step = WARM_UP + REPEATS + 1
    return Overhead(
        engine_s=statistics.median(engine_s for engine_s, _ in pairs),
        plain_s=statistics.median(plain_s for _, plain_s in pairs),
        ratio=statistics.median(plain_s / engine_s for engine_s, plain_s in pairs),
        engine_outside_s=_measure_outside_s(engine, next_step),
        plain_outside_s=_measure_outside_s(plain, next_step),
        losses=losses,
    )


def build_state(device: torch.device, layout: Layout = LAYOUT, rank: int = 0) -> TrainState:
    """Build the quickstart's model and optimizer for a rank of the layout."""
    workload = replace(WORKLOAD, global_batch=WORKLOAD.global_batch * layout.dp)
    return build_train_state(
        Job(model=MODEL, workload=workload, layout=layout),
        RandomTokens(device=device),
        rank=rank,
        device=device,
        initial_value=draw_initial_value,
    )


def _engine_step(state: TrainState) -> TrainStep:
    def step(number: int) -> float:
        result = train_step(
            state,
            step=number,
            lr=WORKLOAD.optimizer.lr,
            stop_requested=False,
            count_ledger=False,
        )
        return result.backward.loss

    return step


def _plain_step(state: TrainState) -> TrainStep:
    """Return the step of a loop over the modules of `state`, on parameters of its own."""
    parameters = []
    for named in list_parameters(state.model):
        named.owner.weight = torch.nn.Parameter(named.owner.weight.detach().clone())
        parameters.append(named.owner.weight)
    spec = WORKLOAD.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
    )

    def step(number: int) -> float:
        batches = [
            state.train_data.micro_batch(state.runtime, number - 1, micro_batch)
            for micro_batch in range(_MICRO_BATCHES)
        ]
        targets = sum(int((batch.targets >= 0).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            out = state.model(batch)
            nll = out.nll.sum()
            (nll / targets + out.aux_losses.sum() / _MICRO_BATCHES).backward()
            total += float(nll.detach())
        torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total / targets

    return step


def _time_step(run: TrainStep, step: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, and its loss."""
    if device.type == "cpu":
        started = time.process_time()
        loss = run(step)
        return time.process_time() - started, loss
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    loss = run(step)
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, loss


def _measure_outside_s(run: TrainStep, first: int) -> float:
    """Return the seconds a step that the host spends outside of torch's operations.

    It is an upper bound: the profiler's own time is among them.
    """
    run(first)
    outside_s = []
    for step in range(first + 1, first + 1 + PROFILED):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            started = time.perf_counter()
            run(step)
            wall_s = time.perf_counter() - started
        rows = [row for row in profile.key_averages() if row.key.startswith("aten::")]
        outside_s.append(wall_s - sum(row.self_cpu_time_total for row in rows) * 1e-6)
    return min(outside_s)


def measure_overlap_ratio(device: DeviceKind, ranks: int) -> float:
    """Return the tokens/s of ZeRO-1 whose collectives overlap, over those without overlap.

    The two run in turn on `ranks` data-parallel ranks; the ratio is the median of REPEATS pairs
    of wall times.

    Raises:
        BadInput: A rank failed.
    """
    return measure_on_ranks(_compare_overlap, device, ranks)


def measure_save_cost(device: DeviceKind, ranks: int) -> float:
    """Return the share by which an asynchronous save at every ten steps lengthens them.

    Ten steps with a save at their start and ten without it run in turn on `ranks` data-parallel
    ranks; the share is the median of pairs. What is left of a save after its ten steps counts. On a
    CPU all threads of a rank count, by their own time: what other jobs take is not in it.

    Raises:
        BadInput: A rank failed.
    """
    return measure_on_ranks(_compare_saves, device, ranks)


def measure_on_ranks(
    compare: Callable[[Path, RankContext], RankOutcome], device: DeviceKind, ranks: int
) -> float:
    """Return the number that rank 0 writes into the file which `compare` gets.

    Raises:
        BadInput: A rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure"
        code = launch(partial(compare, path), nproc=ranks, run_dir=Path(folder), device=device)
        if code is not ExitCode.DONE:
            raise BadInput(Reason(field="benchmarks.engine", rule="a rank failed: see above"))
        return float(path.read_text())


def _compare_overlap(path: Path, context: RankContext) -> RankOutcome:
    """Run the pairs on one rank; rank 0 writes the ratio to `path`."""
    device = init_distributed(context)
    plain = Layout(world_size=context.world_size, mbs=LAYOUT.mbs)
    overlapped = replace(plain, overlap=(Overlap.GRAD, Overlap.PARAM))
    states = [build_state(device, layout, context.rank) for layout in (plain, overlapped)]
    ratios = []
    for step in range(1, WARM_UP + REPEATS + 1):
        context.beat(step)
        seconds = []
        for state in states:
            started = time.perf_counter()
            _engine_step(state)(step)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        plain_s, overlapped_s = seconds
        if step > WARM_UP:
            ratios.append(plain_s / overlapped_s)
    for state in states:
        state.optimizer.finish_pending()
    if context.rank == 0:
        path.write_text(str(statistics.median(ratios)))
    collectives.leave_world()
    return RankOutcome.DONE


def _compare_saves(path: Path, context: RankContext) -> RankOutcome:
    """Run the pairs of ten steps on one rank; rank 0 writes the cost of a save to `path`."""
    device = init_distributed(context)
    layout = Layout(world_size=context.world_size, mbs=LAYOUT.mbs)
    state = build_state(device, layout, context.rank)
    saver = CheckpointSaver(
        path.parent / "checkpoints",
        spec=CheckpointSpec(mode=SaveMode.ASYNC, keep=1),
        extra={},
        comm=build_coordinator(context),
        build_background_comm=partial(build_coordinator, context, in_background=True),
    )
    run_step = _engine_step(state)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    step = 0
    costs = []
    for pair in range(1 + SAVES):
        seconds = {}
        # The order of the two changes, for a machine that becomes faster or slower.
        for saves in (True, False) if pair % 2 else (False, True):
            started = clock()
            if saves:
                saver.save(step, state.local_shards())
            for _ in range(STEPS_A_SAVE):
                step += 1
                context.beat(step)
                run_step(step)
            saver.wait()
            seconds[saves] = clock() - started
        if pair:  # the first warms up
            costs.append(seconds[True] / seconds[False] - 1)
    if context.rank == 0:
        path.write_text(str(statistics.median(costs)))
    collectives.leave_world()
    return RankOutcome.DONE
