"""What the engine costs beside a plain PyTorch loop over the same modules: one process, no feature
on.

Both train the same model on the same tokens in fp32, step by step in turn, so that what else the
machine does hits both. The plain loop is what one would write without the engine: forward,
backward, gradients accumulated by autograd, a clipped norm, torch's fused AdamW.
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

from moewright.engine.comm import collectives
from moewright.engine.data.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import TrainState, train_step
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from moewright.spec.workload import Dtype, LossSpec, OptimizerSpec, Workload

WARM_UP, REPEATS, PROFILED = 3, 15, 3
_LR = 1e-3

# The quickstart's model and batch.
MODEL = ModelSpec(
    name="quickstart",
    family="qwen3_moe",
    hidden_size=256,
    layers=4,
    vocab_size=4096,
    attention=AttentionSpec(
        kind=AttentionKind.GQA,
        heads=8,
        kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        qk_norm=QkNorm.PER_HEAD,
    ),
    dense_ffn_size=768,
    moe=MoeSpec(experts=16, ffn_size=256, router=RouterSpec(top_k=4)),
    moe_layers=(True,) * 4,
)
WORKLOAD = Workload(
    seq_len=256,
    global_batch=4,
    precision=Dtype.FP32,
    optimizer=OptimizerSpec(lr=_LR, clip_norm=1.0),
    loss=LossSpec(aux_coeff=0.01),
)
LAYOUT = Layout(world_size=1, mbs=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Medians over REPEATS pairs of steps; `outside` is the host's time in a step outside of
    torch's operations."""

    engine_s: float
    plain_s: float
    ratio: float  # tokens/s of the engine over the plain loop's, median of pairs
    engine_outside_s: float
    plain_outside_s: float
    losses: tuple[float, float]  # of the last step, engine and plain: the two trained the same


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomTokens:
    """One batch a step, the same for both."""

    device: torch.device

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        dice = torch.Generator().manual_seed((step * 1000 + micro_batch) * 1000 + run.mesh.rank)
        rows = torch.randint(
            0, MODEL.vocab_size, (LAYOUT.mbs, WORKLOAD.seq_len + 1), generator=dice
        ).to(self.device)
        return build_micro_batch(run, rows[:, :-1], rows[:, 1:], None)


def measure_overhead(device: torch.device) -> Overhead:
    """Time the two in turn. On a CPU one thread runs, and its own time counts: what other jobs take
    is not in it."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    job, plain_job = (_job(device) for _ in range(2))
    plain = _plain(plain_job)

    def engine(step: int) -> float:
        return train_step(job, step=step, lr=_LR, stop_requested=False, count_ledger=False).loss

    pairs, losses = [], (0.0, 0.0)
    for step in range(1, WARM_UP + REPEATS + 1):
        ours, theirs = _timed(engine, step, device), _timed(plain, step, device)
        losses = ours[1], theirs[1]
        if step > WARM_UP:
            pairs.append((ours[0], theirs[0]))
    first = WARM_UP + REPEATS + 1
    return Overhead(
        engine_s=statistics.median(ours for ours, _ in pairs),
        plain_s=statistics.median(theirs for _, theirs in pairs),
        ratio=statistics.median(theirs / ours for ours, theirs in pairs),
        engine_outside_s=_outside(engine, first),
        plain_outside_s=_outside(plain, first),
        losses=losses,
    )


def _job(device: torch.device, layout: Layout = LAYOUT, rank: int = 0) -> TrainState:
    work = replace(WORKLOAD, global_batch=WORKLOAD.global_batch * layout.dp)
    return build_train_state(
        MODEL,
        work,
        layout,
        RandomTokens(device=device),
        rank=rank,
        device=device,
        initial_value=draw_initial_value,
    )


def _plain(job: TrainState) -> Callable[[int], float]:
    """A loop over the job's modules alone, on parameters that nothing of the engine hangs on."""
    parameters = []
    for slot in list_parameters(job.model):
        slot.owner.weight = torch.nn.Parameter(slot.owner.weight.detach().clone())
        parameters.append(slot.owner.weight)
    spec = WORKLOAD.optimizer
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    rule = torch.optim.AdamW(
        groups, lr=_LR, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
    )
    count = WORKLOAD.global_batch // LAYOUT.mbs

    def step(number: int) -> float:
        batches = [job.train_data.micro_batch(job.runtime, number - 1, m) for m in range(count)]
        targets = sum(int((batch.targets >= 0).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            out = job.model(batch)
            nll = out.nll.sum()
            (nll / targets + out.aux.sum() / count).backward()
            total += float(nll.detach())
        torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm)
        rule.step()
        rule.zero_grad()
        return total / targets

    return step


def _timed(run: Callable[[int], float], step: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and its loss."""
    if device.type == "cpu":
        started = time.process_time()
        loss = run(step)
        return time.process_time() - started, loss
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    loss = run(step)
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, loss


def _outside(run: Callable[[int], float], first: int) -> float:
    """Seconds a step that the host spends outside of torch's operations, the profiler's own among
    them: a bound."""
    run(first)
    found = []
    for step in range(first + 1, first + 1 + PROFILED):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            started = time.perf_counter()
            run(step)
            wall = time.perf_counter() - started
        rows = profile.key_averages()
        found.append(
            wall
            - sum(row.self_cpu_time_total for row in rows if row.key.startswith("aten::")) * 1e-6
        )
    return min(found)


def measure_overlap_ratio(device: DeviceKind, ranks: int) -> float:
    """Tokens/s of data parallelism with ZeRO-1 whose collectives overlap over that without, in turn
    on `ranks` ranks.

    Median of REPEATS pairs, wall time. Raises BadInput where a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratio"
        if (
            launch(partial(_overlap, path), nproc=ranks, run_dir=Path(folder), device=device)
            is not ExitCode.DONE
        ):
            raise BadInput(Reason(field="bench engine", rule="a rank failed: see above"))
        return float(path.read_text())


def _overlap(path: Path, seat: RankContext) -> RankOutcome:
    device = init_distributed(seat)
    plain = Layout(world_size=seat.world_size, mbs=LAYOUT.mbs)
    jobs = [
        _job(device, layout, seat.rank)
        for layout in (plain, replace(plain, overlap=(Overlap.GRAD, Overlap.PARAM)))
    ]
    ratios = []
    for step in range(1, WARM_UP + REPEATS + 1):
        seat.beat(step)
        seconds = []
        for job in jobs:
            started = time.perf_counter()
            train_step(job, step=step, lr=_LR, stop_requested=False, count_ledger=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        if step > WARM_UP:
            ratios.append(seconds[0] / seconds[1])
    for job in jobs:
        job.optimizer.finish_pending()
    if seat.rank == 0:
        path.write_text(str(statistics.median(ratios)))
    collectives.leave_world()
    return RankOutcome.DONE
