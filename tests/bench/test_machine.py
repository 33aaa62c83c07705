"""The hardware file of a machine: complete, in the right units, sourced, and within its time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moewright.bench import cases as cases_module
from moewright.bench import machine, workers
from moewright.bench.cases import (
    BenchContext,
    Case,
    Probe,
    build_cases,
    draw_expert_rows,
    group_sizes,
    pairing_rounds,
)
from moewright.bench.machine import machine_fingerprint, measure_machine
from moewright.bench.tiny_steps import TINY_SHAPES, solve_host_work
from moewright.bench.workers import run_workers
from moewright.codec import read_toml, write_toml
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective, DeviceKind, Hardware, Op
from moewright.spec.sourced import SourceKind
from moewright.spec.workload import Dtype

CPU = DeviceKind.CPU
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these figures are of a CPU")


def pretend(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[Case, ...]:
    """Every unit of work takes 2 ns on every rank, a collective 1 ms and 1 ns a byte."""
    known = build_cases(CPU, ranks)
    each = tuple(
        1e-3 + case.x * 1e-9 if isinstance(case.op, Collective) else case.work * 2e-9
        for case in known
    )
    times = tuple((seconds,) * ranks for seconds in each)
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: times)
    return known


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_units_and_sources(nproc: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = pretend(monkeypatch, nproc)
    hardware = measure_machine(nproc=nproc)
    device, fabric = hardware.device, hardware.fabric
    assert {(rate.op, rate.dtype) for rate in device.rates} == {
        *((op, dtype) for op in Op if op is not Op.OPTIMIZER for dtype in (Dtype.BF16, Dtype.FP32)),
        (Op.OPTIMIZER, Dtype.FP32),
    }
    for rate in device.rates:
        assert [x for x, _ in rate.curve.points] == [
            *(
                case.x
                for case in known
                if (case.op, case.dtype) == (rate.op, rate.dtype) and case.work
            ),
            *(case.x for case in known if case.op is Probe.COPY and rate.op is Op.ELEMENTWISE),
        ]
        assert all(y == pytest.approx(5e8) for _, y in rate.curve.points)
    assert [peak.rate.value for peak in device.peaks] == pytest.approx([5e8, 5e8])
    assert device.memory_bytes.value * nproc <= os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    times = {(one.op, one.group_size): one.curve.points for one in fabric.times}
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
    curves = (*(rate.curve for rate in device.rates), *(one.curve for one in fabric.times))
    for number in (
        *curves,
        *(peak.rate for peak in device.peaks),
        hardware.constants[0].value,
        fabric.domain_Bps,
    ):
        assert number.kind is SourceKind.MEASURED
        assert torch.__version__ in number.source
        assert "measured 20" in number.source
    write_toml(tmp_path / "hw.toml", hardware)
    assert read_toml(Hardware, tmp_path / "hw.toml") == hardware


def test_curves_ascend() -> None:
    for kind in DeviceKind:
        seen: dict[tuple[str, str, int], float] = {}
        for case in build_cases(kind, 4):
            assert case.x > seen.get(case.curve_key, -1), case
            seen[case.curve_key] = case.x


def test_flops_by_hand() -> None:
    found = {
        (case.op, case.x): case.work for case in build_cases(CPU, 1) if case.dtype is Dtype.BF16
    }
    assert found[Op.GEMM, 2 * 1024 * 512 * 384] == 3 * 2 * 1024 * 512 * 384
    assert found[Op.GROUPED_GEMM, 128] == 3 * 2 * (16 * 128) * 512 * 256
    assert found[Op.ATTENTION, 512] == 2 * 2 * 8 * 512 * 512 * (32 + 32) / 2
    assert found[Op.ATTENTION_BACKWARD, 512] == 2 * found[Op.ATTENTION, 512]


def test_the_smallest_of_every_kind_of_work_runs() -> None:
    smallest: dict[tuple[str, str, int], Case] = {}
    for case in build_cases(CPU, 1):
        smallest.setdefault(case.curve_key, case)
    assert (
        len(smallest) == 5 * 2 + 1 + 2
    )  # ops of both precisions, the optimizer, a copy and a step
    for case in smallest.values():
        case.setup(BenchContext(device=torch.device("cpu")))()


def test_a_launch_is_of_the_host_and_not_of_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 3 ms before it works at 1e9 a second."""
    known = build_cases(CPU, 1)
    times = tuple((3e-3 + case.work * 1e-9,) for case in known)
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: times)
    launched = {case.curve_key[:2] for case in known if not case.work}
    assert {op for op, _ in launched} == {*Op} - {Op.OPTIMIZER}
    rates = {
        (rate.op, rate.dtype): rate.curve.points for rate in measure_machine(nproc=1).device.rates
    }
    for op in (Op.GEMM, Op.GROUPED_GEMM):
        assert all(y == pytest.approx(1e9) for _, y in rates[op, Dtype.BF16])


def test_the_hosts_work_by_hand() -> None:
    """A step of 5 ms; layers of 1 ms without experts, of 2 ms and 0.1 an expert with them; two
    micro-batches."""
    steps = [
        5e-3 + 2 * (of.dense * 1e-3 + of.moe * (2e-3 + of.experts * 1e-4)) for of in TINY_SHAPES
    ]
    found = solve_host_work(steps)
    assert (found.layer_s, found.expert_s, found.step_s) == pytest.approx((2e-3, 1e-4, 5e-3))
    assert found.dense_share == pytest.approx(0.5)


@pytest.mark.parametrize("ranks", [3, 4, 7, 8])
def test_every_pair_meets_once(ranks: int) -> None:
    met = [(one, other) for turn in pairing_rounds(ranks) for one, other in turn.items()]
    assert sorted(met) == sorted(
        (one, other) for one in range(ranks) for other in range(ranks) if one != other
    )


def test_uneven_rows_are_as_many_as_even_ones() -> None:
    torch.manual_seed(0)
    drawn = [draw_expert_rows(32, 16) for _ in range(50)]
    assert all(sum(counts) == 32 * 16 and min(counts) >= 0 for counts in drawn)
    assert len(set(drawn)) == 50


@pytest.mark.spawn
def test_groups_of_every_size_and_all_links_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks: two pairs at once, all of them, and each with each."""
    chosen = tuple(case for case in build_cases(CPU, 4) if case.is_communication and case.x <= 64)
    monkeypatch.setattr(workers, "build_cases", lambda *_: chosen)
    taken = run_workers(CPU, ranks=4, budget_s=10)
    assert {case.ranks for case in chosen} == {2, 4}
    assert all(seconds is not None and len(seconds) == 4 and min(seconds) > 0 for seconds in taken)


def test_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = machine_fingerprint(2)
    assert len(mine) == 16
    assert machine_fingerprint(2) == mine
    assert machine_fingerprint(4) != mine
    monkeypatch.setattr(machine, "device_name", lambda: "another processor")
    assert machine_fingerprint(2) != mine


def test_nproc_is_checked() -> None:
    with pytest.raises(
        BadInput, match=r"nproc=0: must be in 1\.\.\d+ on a machine of \d+ cores; nearest .* 1"
    ):
        measure_machine(nproc=0)


def test_no_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tuple(None for _ in build_cases(CPU, 1))
    monkeypatch.setattr(machine, "run_workers", lambda *_, **__: nothing)
    with pytest.raises(BadInput, match="budget_s=1: was too short to measure gemm, grouped_gemm"):
        measure_machine(nproc=1, budget_s=1)


def sleepy(seconds: float) -> Case:
    """Time passes on the wall only, as in a collective that waits."""
    return Case(
        op=Collective.ALL_REDUCE,
        dtype=Dtype.FP32,
        x=1,
        work=1,
        setup=lambda _: lambda: time.sleep(seconds),
    )


@pytest.mark.spawn
def test_a_team_times_together_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (sleepy(0.01), sleepy(0.5), sleepy(5.0))
    monkeypatch.setattr(workers, "build_cases", lambda *_: chosen)
    started = time.monotonic()
    first, second, third = run_workers(CPU, ranks=2, budget_s=1.5)
    assert time.monotonic() - started < 8
    assert first == pytest.approx((0.01, 0.01), rel=0.5)
    assert second == pytest.approx((0.5, 0.5), rel=0.3)
    assert third is None


@pytest.mark.spawn
def test_work_is_timed_without_what_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "build_cases", lambda *_: (replace(sleepy(0.05), op=Op.GEMM),))
    monkeypatch.setattr(workers, "count_cores", lambda: 2)
    assert run_workers(CPU, ranks=2, budget_s=5)[0] == pytest.approx((0, 0), abs=0.01)
    monkeypatch.setattr(workers, "count_cores", lambda: 1)
    assert run_workers(CPU, ranks=2, budget_s=5)[0] == pytest.approx((0.05, 0.05), rel=0.5)


def break_on_rank_1(case: Case, how: str) -> Case:
    def setup(_: BenchContext) -> cases_module.Call:
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
def test_a_broken_rank_ends_the_team_by_name(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "build_cases", lambda *_: (break_on_rank_1(sleepy(0), how),))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        run_workers(CPU, ranks=2, budget_s=30)
    assert time.monotonic() - started < 5


@pytest.mark.spawn
def lives(pid: str) -> bool:
    """Whether there is such a process that is not merely waiting for its parent to ask for its exit
    code."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_bench_leaves_no_process() -> None:
    """It is killed when its two ranks have started; they would measure on for as long as their
    budget lasts."""
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
    while any(lives(rank) for rank in ranks):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_this_machine() -> None:
    """A short real run: every kind of work and every collective is there, with figures of a
    possible size."""
    started = time.monotonic()
    hardware = measure_machine(nproc=2, budget_s=14.0)
    assert time.monotonic() - started < 40
    rates = {(rate.op, rate.dtype): rate.curve.points for rate in hardware.device.rates}
    assert 1e8 < max(y for _, y in rates[Op.GEMM, Dtype.FP32]) < 1e13
    assert 1e7 < max(y for _, y in rates[Op.ELEMENTWISE, Dtype.BF16]) < 1e13
    assert {one.op for one in hardware.fabric.times} == set(Collective)
    assert all(1e-6 < y < 10 for one in hardware.fabric.times for _, y in one.curve.points)
    constants = {constant.name: constant.value.value for constant in hardware.constants}
    assert (
        0 <= constants["host_s_per_layer_microbatch"] < 1
    )  # a difference: 0 where other jobs took the machine
    assert 0 <= constants["host_s_per_local_expert"] < 0.1
    assert hardware.fingerprint == machine_fingerprint(2)


def test_probes_are_not_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    assert not {rate.op for rate in measure_machine(nproc=1).device.rates} & set(Probe)
