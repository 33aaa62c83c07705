"""The hardware file of a machine: complete, in the right units, sourced, and within its time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from moewright.bench import machine, workers
from moewright.bench.case import BenchContext, Call, Case, Probe
from moewright.bench.collective_cases import group_sizes, pairing_rounds
from moewright.bench.compute_cases import draw_expert_rows
from moewright.bench.machine import machine_fingerprint, measure_machine
from moewright.bench.tiny_steps import TINY_SHAPES, solve_host_work
from moewright.bench.workers import build_cases, run_workers
from moewright.codec import read_toml, write_toml
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective, Curve, DeviceKind, Hardware, Op
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Dtype

CPU = DeviceKind.CPU
pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(torch.cuda.is_available(), reason="these figures are of a CPU"),
]


def pretend_times(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[Case, ...]:
    """Let each unit of work take 2 ns on every rank, a collective 1 ms and 1 ns a byte."""
    cases = build_cases(CPU, ranks)
    times = tuple((_pretended_s(case),) * ranks for case in cases)
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: times)
    return cases


def test_a_budget_too_short_for_an_all_to_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = build_cases(CPU, 2)
    times = tuple(
        None if case.op is Collective.ALL_TO_ALL else (_pretended_s(case),) * 2 for case in cases
    )
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: times)
    with pytest.raises(BadInput, match=r"budget_s.*too short to measure all_to_all.*120"):
        measure_machine(nproc=2, budget_s=60)


def _pretended_s(case: Case) -> float:
    if isinstance(case.op, Collective):
        return 1e-3 + case.x * 1e-9
    return case.work * 2e-9


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_units_and_sources(nproc: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = pretend_times(monkeypatch, nproc)
    hardware = measure_machine(nproc=nproc)
    device = hardware.device
    fabric = hardware.fabric
    assert {(rate.op, rate.dtype) for rate in device.rates} == {
        *((op, dtype) for op in Op if op is not Op.OPTIMIZER for dtype in (Dtype.BF16, Dtype.FP32)),
        (Op.OPTIMIZER, Dtype.FP32),
    }
    for rate in device.rates:
        assert [x for x, _ in rate.curve.points] == [
            *(
                case.x
                for case in cases
                if (case.op, case.dtype) == (rate.op, rate.dtype) and case.work
            ),
            *(case.x for case in cases if case.op is Probe.COPY and rate.op is Op.ELEMENTWISE),
        ]
        assert all(y == pytest.approx(5e8) for _, y in rate.curve.points)
    assert [peak.rate.value for peak in device.peaks] == pytest.approx([5e8, 5e8])
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device.memory_bytes.value * nproc <= machine_bytes
    times = {(entry.op, entry.group_size): entry.curve.points for entry in fabric.times}
    assert set(times) == {(op, size) for op in Collective for size in group_sizes(nproc)}
    for points in times.values():
        assert all(y == pytest.approx(1e-3 + x * 1e-9) for x, y in points)
        assert points[0][0] <= 64
        assert points[-1][0] > 16e6
    assert (hardware.count, fabric.domain_size, len(device.peaks)) == (nproc, nproc, 2)
    if nproc > 1:
        payload = times[Collective.ALL_TO_ALL, nproc][-1][0]
        expected = payload * (nproc - 1) / nproc / (1e-3 + payload * 1e-9)
        assert fabric.domain_Bps.value == pytest.approx(expected)
    assert len(fabric.links) == (0 if nproc < 3 else nproc * (nproc - 1) // 2)
    assert all(link.Bps.value == pytest.approx(5e8) for link in fabric.links)
    curves = (*(rate.curve for rate in device.rates), *(entry.curve for entry in fabric.times))
    numbers: tuple[Sourced | Curve, ...] = (
        *curves,
        *(peak.rate for peak in device.peaks),
        hardware.constants[0].value,
        fabric.domain_Bps,
    )
    for number in numbers:
        assert number.kind is SourceKind.MEASURED
        assert torch.__version__ in number.source
        assert "measured 20" in number.source
    write_toml(tmp_path / "hw.toml", hardware)
    assert read_toml(Hardware, tmp_path / "hw.toml") == hardware


def test_curves_ascend() -> None:
    for kind in DeviceKind:
        last_x: dict[tuple[str, str, int], float] = {}
        for case in build_cases(kind, 4):
            assert case.x > last_x.get(case.curve_key, -1), case
            last_x[case.curve_key] = case.x


def test_flops_by_hand() -> None:
    flops = {
        (case.op, case.x): case.work for case in build_cases(CPU, 1) if case.dtype is Dtype.BF16
    }
    assert flops[Op.GEMM, 2 * 1024 * 512 * 384] == 3 * 2 * 1024 * 512 * 384
    assert flops[Op.GROUPED_GEMM, 128] == 3 * 2 * (16 * 128) * 512 * 256
    assert flops[Op.ATTENTION, 512] == 2 * 2 * 8 * 512 * 512 * (32 + 32) / 2
    assert flops[Op.ATTENTION_BACKWARD, 512] == 2 * flops[Op.ATTENTION, 512]


def test_the_smallest_of_every_kind_of_work_runs() -> None:
    smallest: dict[tuple[str, str, int], Case] = {}
    for case in build_cases(CPU, 1):
        smallest.setdefault(case.curve_key, case)
    # Ops of both precisions, the optimizer, a copy and a step.
    assert len(smallest) == 5 * 2 + 1 + 2
    for case in smallest.values():
        case.setup(BenchContext(device=torch.device("cpu")))()


def test_a_launch_is_of_the_host_and_not_of_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 3 ms before it works at 1e9 a second."""
    cases = build_cases(CPU, 1)
    times = tuple((3e-3 + case.work * 1e-9,) for case in cases)
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: times)
    launches = {case.op for case in cases if not case.work}
    assert launches == {*Op} - {Op.OPTIMIZER}
    rates = {
        (rate.op, rate.dtype): rate.curve.points for rate in measure_machine(nproc=1).device.rates
    }
    for op in (Op.GEMM, Op.GROUPED_GEMM):
        assert all(y == pytest.approx(1e9) for _, y in rates[op, Dtype.BF16])


def test_the_hosts_work_by_hand() -> None:
    """A step of 5 ms and two micro-batches; layers of 1 ms, or of 2 ms and 0.1 an expert."""
    steps = [
        5e-3 + 2 * (shape.dense * 1e-3 + shape.moe * (2e-3 + shape.experts * 1e-4))
        for shape in TINY_SHAPES
    ]
    work = solve_host_work(steps)
    assert (work.layer_s, work.expert_s, work.step_s) == pytest.approx((2e-3, 1e-4, 5e-3))
    assert work.dense_share == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [3, 4, 7, 8])
def test_every_pair_meets_once(ranks: int) -> None:
    pairs = [pair for partners in pairing_rounds(ranks) for pair in partners.items()]
    assert sorted(pairs) == sorted(permutations(range(ranks), 2))


def test_uneven_rows_are_as_many_as_even_ones() -> None:
    torch.manual_seed(0)
    draws = [draw_expert_rows(32, 16) for _ in range(50)]
    assert all(sum(rows) == 32 * 16 and min(rows) >= 0 for rows in draws)
    assert len(set(draws)) == 50


@pytest.mark.thorough
@pytest.mark.spawn
def test_groups_of_every_size_and_all_links_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks: two pairs at once, all of them, and each with each."""
    cases = tuple(case for case in build_cases(CPU, 4) if case.is_communication and case.x <= 64)
    assert {case.ranks for case in cases} == {2, 4}
    monkeypatch.setattr(workers, "build_cases", lambda *_: cases)
    for seconds in run_workers(CPU, ranks=4, budget_s=10):
        assert seconds is not None
        assert len(seconds) == 4
        assert min(seconds) > 0


def test_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = machine_fingerprint(2)
    assert len(fingerprint) == 16
    assert machine_fingerprint(2) == fingerprint
    assert machine_fingerprint(4) != fingerprint
    monkeypatch.setattr(machine, "device_name", lambda: "another processor")
    assert machine_fingerprint(2) != fingerprint


def test_nproc_is_checked() -> None:
    with pytest.raises(
        BadInput, match=r"nproc=0: must be in 1\.\.\d+ on a machine of \d+ cores; nearest .* 1"
    ):
        measure_machine(nproc=0)


def test_a_budget_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured = tuple(None for _ in build_cases(CPU, 1))
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: unmeasured)
    with pytest.raises(BadInput, match="budget_s=1: was too short to measure gemm, grouped_gemm"):
        measure_machine(nproc=1, budget_s=1)


def sleeping_case(seconds: float) -> Case:
    """Build a case whose time passes on the wall clock only, as in a collective that waits."""
    return Case(
        op=Collective.ALL_REDUCE,
        dtype=Dtype.FP32,
        x=1,
        work=1,
        setup=lambda _: lambda: time.sleep(seconds),
    )


@pytest.mark.spawn
def test_workers_time_together_and_stop_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (sleeping_case(0.01), sleeping_case(0.5), sleeping_case(5.0))
    monkeypatch.setattr(workers, "build_cases", lambda *_: cases)
    started = time.monotonic()
    first, second, third = run_workers(CPU, ranks=2, budget_s=1.5)
    assert time.monotonic() - started < 8
    assert first == pytest.approx((0.01, 0.01), rel=0.5)
    assert second == pytest.approx((0.5, 0.5), rel=0.3)
    assert third is None


@pytest.mark.spawn
def test_work_is_timed_without_what_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(sleeping_case(0.05), op=Op.GEMM)
    monkeypatch.setattr(workers, "build_cases", lambda *_: (case,))
    monkeypatch.setattr(workers, "count_cores", lambda: 2)
    assert run_workers(CPU, ranks=2, budget_s=5)[0] == pytest.approx((0, 0), abs=0.01)
    monkeypatch.setattr(workers, "count_cores", lambda: 1)
    assert run_workers(CPU, ranks=2, budget_s=5)[0] == pytest.approx((0.05, 0.05), rel=0.5)


def break_on_rank_1(case: Case, how: str) -> Case:
    def setup(_: BenchContext) -> Call:
        if torch.distributed.get_rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such kernel")
        return lambda: torch.distributed.barrier()

    return replace(case, setup=setup)


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "rank 1 .*failed:.*no such kernel"), ("kill", "rank 1 .*killed by signal 9")],
)
def test_a_broken_rank_ends_the_others_and_is_named(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = break_on_rank_1(sleeping_case(0), how)
    monkeypatch.setattr(workers, "build_cases", lambda *_: (case,))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        run_workers(CPU, ranks=2, budget_s=30)
    assert time.monotonic() - started < 5


def is_alive(pid: str) -> bool:
    """Return whether the process runs; one that only waits for its parent to reap it does not."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.spawn
def test_a_killed_bench_leaves_no_process() -> None:
    """It is killed when its two ranks have started; they would measure until the budget ends."""
    bench = multiprocessing.get_context("fork").Process(
        target=run_workers, args=(CPU,), kwargs={"ranks": 2, "budget_s": 20}
    )
    bench.start()
    assert bench.pid is not None
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    deadline_s = time.monotonic() + 10
    while len(ranks := children.read_text().split()) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(bench.pid, signal.SIGKILL)
    bench.join()
    deadline_s = time.monotonic() + 5
    while any(is_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_this_machine() -> None:
    """A short real run has every kind of work and every collective, with plausible figures."""
    started = time.monotonic()
    hardware = measure_machine(nproc=2, budget_s=8.0)
    assert time.monotonic() - started < 40
    rates = {(rate.op, rate.dtype): rate.curve.points for rate in hardware.device.rates}
    assert 1e8 < max(y for _, y in rates[Op.GEMM, Dtype.FP32]) < 1e13
    assert 1e7 < max(y for _, y in rates[Op.ELEMENTWISE, Dtype.BF16]) < 1e13
    times = hardware.fabric.times
    assert {entry.op for entry in times} == set(Collective)
    assert all(1e-6 < y < 10 for entry in times for _, y in entry.curve.points)
    constants = {constant.name: constant.value.value for constant in hardware.constants}
    # A difference of two steps: it is 0 where other jobs took the machine.
    assert 0 <= constants["host_s_per_layer_microbatch"] < 1
    assert 0 <= constants["host_s_per_local_expert"] < 0.1
    assert hardware.fingerprint == machine_fingerprint(2)


def test_probes_are_not_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_times(monkeypatch, 1)
    assert not {rate.op for rate in measure_machine(nproc=1).device.rates} & set(Probe)
