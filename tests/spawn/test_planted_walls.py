"""The diagnosis names a planted wall first and its cause among the first two.

Each run of the engine has a single thing made slow, where it happens: in the call of a collective,
in the loader, in the forward of a module. The diagnosis sees only what the run wrote down.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tiny_jobs
from moewright.codec import read_run, read_toml
from moewright.cost.estimate import estimate
from moewright.diagnosis.engine_run import diagnose_run
from moewright.diagnosis.traces.breakdown import break_down_step
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.rank_skew import measure_rank_skew
from moewright.diagnosis.traces.trace_findings import diagnose_traces
from moewright.diagnosis.traces.trace_waterfall import find_peak_rate
from moewright.engine.comm import collectives
from moewright.engine.model import transformer
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run import corpus_loader
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.finding import Cause, Wall
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import DataSpec, LossSpec, ProfileSpec, RouterForce, RouterTraining

pytestmark = [pytest.mark.spawn, pytest.mark.serial]

MACHINE = Path(__file__).parent.parent / "golden" / "machine_2cpu.toml"
# One of each wall that a busy machine shows too; `make test-all` plants all of them.
IN_EVERY_TEST = ("slow_dp", "starved", "tiny_experts", "full_memory")
STEPS = 8
# The delay of a call lies far above what a step of these models takes, so that noise of the machine
# decides nothing.
SLOW_S = 0.02
# Layers wide enough that products, not the interpreter, fill a step of the cases that plant nothing
# slow.
WIDE = replace(
    tiny_jobs.MODEL,
    hidden_size=256,
    layers=2,
    moe_layers=(True, True),
    moe=replace(tiny_jobs.MODEL.moe, ffn_size=512),
)
# Each token takes a single expert of four: wherever the preference falls, a rank gets most rows.
HOT = replace(WIDE, moe=replace(WIDE.moe, experts=4, router=replace(WIDE.moe.router, top_k=1)))
FINE_GRAINED = replace(
    WIDE, moe=replace(WIDE.moe, experts=128, ffn_size=8, router=replace(WIDE.moe.router, top_k=4))
)

Plant = Callable[[pytest.MonkeyPatch], None]


def slow_group(*names: str) -> Plant:
    """Delay every collective and message of these groups for all ranks, as over a bad link."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def wait(transfer: collectives.TimedWork) -> bool:
            with transfer.group.measure_wait(transfer.name):
                if transfer.group.name in names:
                    time.sleep(SLOW_S)
                return transfer.work is None or bool(transfer.work.wait())

        patch.setattr(collectives.TimedWork, "wait", wait)

    return plant


def delay(function: Callable[..., Any], seconds: float, rank: int = -1) -> Callable[..., Any]:
    def delayed(*args: Any, **options: Any) -> Any:
        if rank < 0 or (dist.is_initialized() and dist.get_rank() == rank):
            time.sleep(seconds)
        return function(*args, **options)

    return delayed


def stall_calls(target: Any, name: str, seconds: float = 2 * SLOW_S, rank: int = -1) -> Plant:
    """Make the host sleep before every call of a function."""
    return lambda patch: patch.setattr(target, name, delay(getattr(target, name), seconds, rank))


def grow_heap(patch: pytest.MonkeyPatch) -> None:
    """Make a large heap that Python walks again and again."""
    original_forward = transformer.Transformer.forward
    heap: list[object] = []

    def forward(*args: Any, **options: Any) -> Any:
        if not heap:
            heap.extend({number: [number]} for number in range(200_000))
        gc.collect()
        return original_forward(*args, **options)

    patch.setattr(transformer.Transformer, "forward", forward)


def plant_nothing(patch: pytest.MonkeyPatch) -> None:
    """Plant nothing: the layout or the model is slow by itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    wall: Wall
    cause: Cause
    plant: Plant = plant_nothing
    layout: str = "ep2"
    world: int = 2
    model: Any = tiny_jobs.MODEL
    workload_changes: tuple[tuple[str, Any], ...] = ()
    # The device's memory over the predicted peak; 0 leaves the machine's memory.
    memory_ratio: float = 0.0
    prefetch: bool = True


COMM = Wall.COMMUNICATION
HOST = Wall.HOST
COMPUTE = Wall.COMPUTE
MEMORY = Wall.MEMORY
LONG = (("seq_len", 256),)
SKEW = (
    *LONG,
    ("router", RouterTraining(force=RouterForce.SKEWED, force_std=30.0)),
    ("loss", LossSpec()),
)
FORWARD = (transformer.Transformer, "forward")
LOADER = (corpus_loader.CorpusLoader, "micro_batch")
CASES = (
    Case(name="slow_ep", wall=COMM, cause=Cause.EP, plant=slow_group("ep")),
    Case(name="slow_ep_mbs2", wall=COMM, cause=Cause.EP, plant=slow_group("ep"), layout="ep2,mbs2"),
    Case(
        name="slow_ep_allgather",
        wall=COMM,
        cause=Cause.EP,
        plant=slow_group("ep"),
        layout="ep2,dispatcher=allgather",
    ),
    Case(
        name="slow_dp", wall=COMM, cause=Cause.DP, plant=slow_group("dp_cp", "edp"), layout="mbs4"
    ),
    Case(
        name="slow_dp_zero0",
        wall=COMM,
        cause=Cause.DP,
        plant=slow_group("dp_cp", "edp"),
        layout="mbs4,zero0",
    ),
    Case(
        name="slow_dp_beside_ep",
        wall=COMM,
        cause=Cause.DP,
        plant=slow_group("dp_cp"),
        layout="ep2,mbs4",
    ),
    Case(name="slow_tp_sp", wall=COMM, cause=Cause.TP, plant=slow_group("tp"), layout="tp2,ep2"),
    Case(
        name="slow_tp",
        wall=COMM,
        cause=Cause.TP,
        plant=slow_group("tp"),
        layout="tp2,sp0",
        model=tiny_jobs.DENSE,
    ),
    Case(name="slow_etp", wall=COMM, cause=Cause.TP, plant=slow_group("etp"), layout="tp2,etp2"),
    Case(
        name="slow_cp_ring",
        wall=COMM,
        cause=Cause.CP,
        plant=slow_group("cp", "cp_kv"),
        layout="cp2",
    ),
    Case(
        name="slow_cp_gather",
        wall=COMM,
        cause=Cause.CP,
        plant=slow_group("cp", "cp_kv"),
        layout="cp2,cp_comm=allgather",
    ),
    Case(
        name="slow_cp_heads",
        wall=COMM,
        cause=Cause.CP,
        plant=slow_group("cp", "cp_a2a"),
        layout="cp2,cp_comm=a2a",
    ),
    Case(
        name="slow_pp",
        wall=COMM,
        cause=Cause.PP,
        plant=slow_group("pp"),
        layout="pp2,layout='Ett|tL'",
    ),
    Case(
        name="bubble_pp2",
        wall=COMM,
        cause=Cause.PP,
        layout="pp2,mbs8,layout='Et|tL'",
        model=WIDE,
        workload_changes=LONG,
    ),
    Case(
        name="bubble_pp2_m2",
        wall=COMM,
        cause=Cause.PP,
        layout="pp2,mbs4,layout='Et|tL'",
        model=WIDE,
        workload_changes=LONG,
    ),
    Case(
        name="stall_forward",
        wall=HOST,
        cause=Cause.HOST_OTHER,
        plant=stall_calls(*FORWARD),
        world=1,
        layout="mbs2",
    ),
    Case(
        name="stall_forward_ep",
        wall=HOST,
        cause=Cause.HOST_OTHER,
        plant=stall_calls(*FORWARD),
        layout="ep2,mbs2",
    ),
    Case(
        name="stall_optimizer",
        wall=HOST,
        cause=Cause.HOST_OTHER,
        plant=stall_calls(DistributedOptimizer, "update", 10 * SLOW_S),
        layout="mbs2",
    ),
    Case(
        name="stall_one_rank",
        wall=HOST,
        cause=Cause.HOST_OTHER,
        plant=stall_calls(*FORWARD, rank=1),
        layout="ep2,mbs2",
    ),
    Case(
        name="garbage",
        wall=HOST,
        cause=Cause.GARBAGE_COLLECTION,
        plant=grow_heap,
        world=1,
        layout="mbs2",
    ),
    Case(
        name="starved",
        wall=HOST,
        cause=Cause.DATA,
        plant=stall_calls(*LOADER),
        prefetch=False,
        world=1,
        layout="mbs2",
    ),
    Case(
        name="starved_ep",
        wall=HOST,
        cause=Cause.DATA,
        plant=stall_calls(*LOADER),
        prefetch=False,
        layout="ep2,mbs2",
    ),
    Case(
        name="starved_one_rank",
        wall=HOST,
        cause=Cause.DATA,
        plant=stall_calls(*LOADER, rank=1),
        prefetch=False,
        layout="ep2,mbs2",
    ),
    Case(
        name="tiny_experts",
        wall=COMPUTE,
        cause=Cause.FEW_ROWS,
        world=1,
        layout="mbs1",
        model=FINE_GRAINED,
    ),
    Case(
        name="tiny_experts_long",
        wall=COMPUTE,
        cause=Cause.FEW_ROWS,
        world=1,
        layout="mbs1",
        model=FINE_GRAINED,
        workload_changes=LONG,
    ),
    Case(
        name="skewed",
        wall=COMPUTE,
        cause=Cause.IMBALANCE,
        layout="ep2,mbs4",
        model=HOT,
        workload_changes=SKEW,
    ),
    Case(
        name="recompute",
        wall=COMPUTE,
        cause=Cause.RECOMPUTE,
        world=1,
        layout="mbs2,recompute=full",
        model=WIDE,
        workload_changes=LONG,
    ),
    Case(
        name="recompute_mbs4",
        wall=COMPUTE,
        cause=Cause.RECOMPUTE,
        world=1,
        layout="mbs4,recompute=full",
        model=WIDE,
        workload_changes=LONG,
    ),
    Case(
        name="full_memory", wall=MEMORY, cause=Cause.CAPACITY, layout="ep2,mbs4", memory_ratio=1.02
    ),
    Case(
        name="full_memory_mbs8",
        wall=MEMORY,
        cause=Cause.CAPACITY,
        world=1,
        layout="mbs8",
        model=WIDE,
        workload_changes=LONG,
        memory_ratio=1.05,
    ),
)


def _param(case: Case) -> object:
    marks = () if case.name in IN_EVERY_TEST else pytest.mark.thorough
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def build_case_plan(case: Case, data: DataSpec) -> Plan:
    hardware = replace(read_toml(Hardware, MACHINE), count=case.world)
    hardware = replace(hardware, fabric=replace(hardware.fabric, domain_size=case.world, times=()))
    base = tiny_jobs.build_plan(
        tiny_jobs.build_workload(
            replace(data, prefetch=case.prefetch), steps=STEPS, **dict(case.workload_changes)
        ),
        case.layout,
        world_size=case.world,
        model=case.model,
    )
    prediction = estimate(base.model, base.workload, hardware, base.layout)
    if case.memory_ratio:
        memory = Sourced(
            value=case.memory_ratio * prediction.peak_bytes, kind=SourceKind.ASSUMED, source="test"
        )
        hardware = replace(hardware, device=replace(hardware.device, memory_bytes=memory))
        prediction = estimate(base.model, base.workload, hardware, base.layout)
    return replace(base, hardware=hardware, estimate=prediction)


@pytest.mark.parametrize("case", [_param(case) for case in CASES])
def test_the_wall_that_was_planted_is_named_first(
    case: Case, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.plant(monkeypatch)
    assert train(build_case_plan(case, data), tmp_path / "run") is ExitCode.DONE
    record = read_run(tmp_path / "run")
    assert len(record.paces) == case.world
    findings = diagnose_run(record)
    summary = [
        (finding.wall.value, finding.cause.value, round(finding.share, 3), finding.title)
        for finding in findings
    ]
    assert findings[0].wall is case.wall, summary
    assert case.cause in [finding.cause for finding in findings[:2]], summary


TRACED_CASES = ("slow_ep", "slow_dp", "stall_forward", "starved_ep")


@pytest.mark.thorough  # a trace does not tell time that waits for a core: on idle cores only
@pytest.mark.parametrize("name", TRACED_CASES)
def test_a_trace_of_a_run_names_the_wall_of_its_record(
    name: str, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == name)
    case.plant(monkeypatch)
    window = ProfileSpec(start=4, end=7, ranks=tuple(range(case.world)))
    plan = build_case_plan(
        replace(case, workload_changes=(*case.workload_changes, ("profile", window))), data
    )
    assert train(plan, tmp_path / "run") is ExitCode.DONE
    captures = read_traces(tmp_path / "run" / "trace")
    breakdowns = tuple(break_down_step(capture, plan.layout) for capture in captures)
    trace_findings = diagnose_traces(
        breakdowns,
        measure_rank_skew(captures, breakdowns, plan.layout),
        None,
        find_peak_rate(breakdowns, None),
    )
    record_findings = diagnose_run(read_run(tmp_path / "run"))
    summary = [
        (finding.wall.value, finding.cause.value, round(finding.share, 3))
        for finding in (*trace_findings, *record_findings)
    ]
    assert trace_findings[0].wall is record_findings[0].wall is case.wall, summary
    if case.wall is COMM:
        assert trace_findings[0].cause is case.cause, summary


def test_every_wall_has_cases_and_there_are_two_dozen() -> None:
    assert len(CASES) >= 24
    assert {case.wall for case in CASES} == set(Wall)
    assert len({case.name for case in CASES}) == len(CASES)
