"""This machine as a hardware file: rates of compute, times of collectives, each with its source."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch

from moewright.bench.case import Case, Probe
from moewright.bench.collective_cases import pairing_rounds
from moewright.bench.tiny_steps import TINY_SHAPES, HostWork, solve_host_work
from moewright.bench.workers import CallClock, build_cases, choose_clock, run_workers
from moewright.engine.run.early_checks import count_cores, refuse_too_many_processes
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import (
    Collective,
    CollectiveTime,
    Constant,
    Curve,
    Device,
    DeviceKind,
    DtypePeak,
    Fabric,
    Hardware,
    Link,
    NetworkKind,
    Op,
    OpRate,
)
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Dtype

# A part of the fingerprint: it is raised when the same machine would be described differently.
BENCH_VERSION = 5
# Least share of a call that counts as work, in case the launch was measured too slow.
MIN_WORK_SHARE = 0.1
DEFAULT_BUDGET_S = 45.0
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

CurvePoints = tuple[tuple[float, float], ...]
_DTYPES = (Dtype.BF16, Dtype.FP32)
_OP_SOURCES = {
    Op.GEMM: "linear forward and both backward products",
    Op.GROUPED_GEMM: "experts' linear, forward and both backward products",
    Op.ATTENTION: "causal flash attention, 4 query heads a key head",
    Op.ATTENTION_BACKWARD: "causal flash attention, 4 query heads a key head",
    Op.ELEMENTWISE: (
        "a layer's norms, rotation, residuals, permutes and SwiGLU, forward and backward; "
        "last a copy"
    ),
    Op.OPTIMIZER: "fused AdamW over flat fp32 buffers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """The measurements of a machine, in the units of the hardware file."""

    rates: Mapping[tuple[Op, Dtype], CurvePoints]  # by the unit of each op's curve
    copy_Bps: CurvePoints  # by bytes read and written
    tiny_step_s: tuple[float, ...]  # by TINY_SHAPES
    collectives: Mapping[tuple[Collective, int], CurvePoints]  # seconds by payload bytes
    links: Mapping[tuple[int, int], float]  # bytes/s each way by pair of ranks


def measure_machine(*, nproc: int, budget_s: float = DEFAULT_BUDGET_S) -> Hardware:
    """Measure with `nproc` processes at once, one thread (or one GPU) each.

    Takes about `budget_s` seconds at most; a slow or busy machine loses the largest points of the
    curves, not the small ones. Work is timed by CPU time where every process has a core, so other
    jobs hardly distort it; collectives are timed by the wall clock. Peaks are the best GEMM rates
    measured, so MFU is a share of what torch reaches here. On a CPU the thread that launches also
    works, so the launch is counted in the host's time and left out of the rates.

    Raises:
        BadInput: The machine has too few cores or GPUs, or the budget was too short.
    """
    kind = _device_kind(nproc)
    seconds = run_workers(kind, ranks=nproc, budget_s=budget_s)
    measured = _collect(zip(build_cases(kind, nproc), seconds, strict=True), nproc)
    missing = _list_missing(measured, nproc)
    if missing:
        rule = f"was too short to measure {', '.join(missing)}"
        nearest = f"{max(DEFAULT_BUDGET_S, 2 * budget_s):g}"
        raise BadInput(Reason(field="budget_s", value=f"{budget_s:g}", rule=rule, nearest=nearest))
    source = _describe_measurement(kind, nproc)
    work_source = source
    if choose_clock(kind, nproc) is CallClock.THREAD:
        work_source = f"{source}, CPU time"
    return Hardware(
        name=f"{nproc} x {device_name()}",
        count=nproc,
        device=_build_device(kind, nproc, measured, work_source),
        fabric=_build_fabric(kind, nproc, measured, source),
        constants=_build_constants(solve_host_work(measured.tiny_step_s), work_source),
        fingerprint=machine_fingerprint(nproc),
    )


def _collect(results: Iterable[tuple[Case, tuple[float, ...] | None]], ranks: int) -> Measurements:
    """Turn the seconds of each case on every rank into curves; None is a case not measured."""
    rates: dict[tuple[Op | Probe, Dtype], list[tuple[float, float]]] = defaultdict(list)
    collectives: dict[tuple[Collective, int], list[tuple[float, float]]] = defaultdict(list)
    launch_s: dict[tuple[Op | Probe, Dtype], float] = {}
    links: dict[tuple[int, int], float] = {}
    for case, seconds in results:
        if seconds is None:
            continue
        if isinstance(case.op, Collective):
            collectives[case.op, case.ranks].append((case.x, fmean(seconds)))
        elif case.op is Probe.LINK:
            links |= _link_rates(case, seconds, ranks)
        elif not case.work:
            launch_s[case.op, case.dtype] = fmean(seconds)
        else:
            call_s = fmean(seconds)
            beyond_launch_s = call_s - launch_s.get((case.op, case.dtype), 0.0)
            work_s = max(beyond_launch_s, MIN_WORK_SHARE * call_s)
            rates[case.op, case.dtype].append((case.x, case.work / work_s))
    curves = {key: tuple(sorted(points)) for key, points in rates.items()}
    copy_Bps = curves.pop((Probe.COPY, Dtype.FP32), ())
    steps_per_s = curves.pop((Probe.STEP, Dtype.BF16), ())
    op_rates = {(op, dtype): points for (op, dtype), points in curves.items() if isinstance(op, Op)}
    for dtype in _DTYPES:
        key = (Op.ELEMENTWISE, dtype)
        op_rates[key] = _extend_past_caches(op_rates.get(key, ()), copy_Bps)
    return Measurements(
        rates=op_rates,
        copy_Bps=copy_Bps,
        tiny_step_s=tuple(1 / rate for _, rate in steps_per_s),
        collectives={key: tuple(sorted(points)) for key, points in collectives.items()},
        links=links,
    )


def _link_rates(case: Case, seconds: tuple[float, ...], ranks: int) -> dict[tuple[int, int], float]:
    """Return the bytes/s of each pair of a round, from the mean seconds of its two ranks."""
    partners = pairing_rounds(ranks)[round(case.x) - 1]
    return {
        (first, second): case.work / fmean((seconds[first], seconds[second]))
        for first, second in partners.items()
        if first < second
    }


def _extend_past_caches(passes: CurvePoints, copies: CurvePoints) -> CurvePoints:
    """Return the rates of passes, and for more bytes those of a copy that no cache holds."""
    if not passes:
        return ()
    largest = passes[-1][0]
    return (*passes, *(point for point in copies if point[0] > largest))


def _list_missing(measured: Measurements, nproc: int) -> list[str]:
    """List what a hardware file cannot be without and was not measured."""
    ops = {op for (op, _), points in measured.rates.items() if points}
    missing: list[str] = [op for op in Op if op not in ops]
    if not measured.copy_Bps:
        missing.append(Probe.COPY)
    if len(measured.tiny_step_s) < len(TINY_SHAPES):
        missing.append(Probe.STEP)
    if nproc > 1 and (Collective.ALL_TO_ALL, nproc) not in measured.collectives:
        missing.append(Collective.ALL_TO_ALL)
    return missing


def _build_constants(host: HostWork, source: str) -> tuple[Constant, ...]:
    """Return the constants of the host's work, which is all that steps of tiny models cost."""
    constants = (
        ("host_s_per_layer_microbatch", host.layer_s, "more layers"),
        ("host_s_per_local_expert", host.expert_s, "more experts"),
        ("host_dense_layer_share", host.dense_share, "more layers without experts"),
        ("step_tail_s", host.step_s, "what is left besides layers"),
    )
    return tuple(
        Constant(name=name, value=_sourced(value, f"{source}: steps of tiny models, {what}"))
        for name, value, what in constants
    )


def machine_fingerprint(nproc: int) -> str:
    """Return 16 hex digits that change with the machine, torch version or number of processes.

    The machine is told by its device, its processor's architecture, its cores and its memory.
    """
    facts = (
        BENCH_VERSION,
        device_name(),
        platform.machine(),
        count_cores(),
        _memory_bytes(),
        torch.__version__,
        nproc,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def device_name() -> str:
    """Return the GPU's name, or the processor's as /proc/cpuinfo has it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _device_kind(nproc: int) -> DeviceKind:
    """Return the kind of device that so many processes measure.

    Raises:
        BadInput: There are not enough cores or GPUs.
    """
    refuse_too_many_processes(nproc)
    if not torch.cuda.is_available():
        return DeviceKind.CPU
    gpus = torch.cuda.device_count()
    if nproc > gpus:
        rule = f"this machine has {gpus} GPUs, and a process takes one"
        raise BadInput(Reason(field="nproc", value=str(nproc), rule=rule, nearest=str(gpus)))
    return DeviceKind.CUDA


def _describe_measurement(kind: DeviceKind, nproc: int) -> str:
    """Say when, where and how it was measured, as the source of every number."""
    day = datetime.now(UTC).date().isoformat()
    processes = f"{nproc} processes at once" if nproc > 1 else "one process"
    unit = "thread" if kind is DeviceKind.CPU else "GPU"
    machine = f"{device_name()}, torch {torch.__version__}, {processes}, 1 {unit} each"
    return f"measured {day}, {machine}, lower quartile of repeats"


def _sourced(value: float, source: str) -> Sourced:
    return Sourced(value=value, kind=SourceKind.MEASURED, source=source)


def _curve(points: CurvePoints, source: str) -> Curve:
    return Curve(points=points, kind=SourceKind.MEASURED, source=source)


def _build_device(kind: DeviceKind, nproc: int, measured: Measurements, source: str) -> Device:
    rates = tuple(
        OpRate(op=op, dtype=dtype, curve=_curve(measured.rates[op, dtype], f"{source}: {what}"))
        for op, what in _OP_SOURCES.items()
        for dtype in _DTYPES
        if (op, dtype) in measured.rates
    )
    peaks = []
    for dtype in _DTYPES:
        best = max(rate for _, rate in measured.rates[Op.GEMM, dtype])
        peaks.append(DtypePeak(dtype=dtype, rate=_sourced(best, f"{source}: best GEMM rate")))
    if kind is DeviceKind.CPU:
        memory_source = f"memory of the machine or its control group / {nproc} processes"
        memory = _sourced(_memory_bytes() / nproc, memory_source)
    else:
        memory = _sourced(float(torch.cuda.mem_get_info(0)[1]), "total memory by the CUDA driver")
    return Device(
        name=device_name(),
        kind=kind,
        memory_bytes=memory,
        memory_Bps=_sourced(measured.copy_Bps[0][1], f"{source}: copy of 64 MiB, read and written"),
        peaks=tuple(peaks),
        rates=rates,
    )


def _build_fabric(kind: DeviceKind, nproc: int, measured: Measurements, source: str) -> Fabric:
    """Return the fabric of one domain, the machine.

    Bandwidth is what leaves a rank in the largest all-to-all, latency the time of the smallest.
    """
    order = list(Collective)
    curves = sorted(
        measured.collectives.items(), key=lambda item: (item[0][1], order.index(item[0][0]))
    )
    times = tuple(
        CollectiveTime(
            op=op, group_size=size, curve=_curve(points, f"{source}: {op} in groups of {size}")
        )
        for (op, size), points in curves
    )
    link_source = f"{source}: exchange of 4 MiB, all pairs of a round at once"
    links = tuple(
        Link(first=first, second=second, Bps=_sourced(rate, link_source))
        for (first, second), rate in sorted(measured.links.items())
    )
    if nproc > 1:
        all_to_all = measured.collectives[Collective.ALL_TO_ALL, nproc]
        smallest_bytes, latency_s = all_to_all[0]
        largest_bytes, largest_s = all_to_all[-1]
        bandwidth_Bps = largest_bytes * (nproc - 1) / nproc / largest_s
        domain_source = (
            f"{source}: all-to-all of {largest_bytes:.0f} and of {smallest_bytes:.0f} bytes"
        )
    else:
        bandwidth_Bps = measured.copy_Bps[0][1]
        latency_s = 0.0
        domain_source = f"{source}: one process sends nothing; the rate of a copy stands here"
    network_source = f"{domain_source}; one machine has no network, the same figure stands here"
    return Fabric(
        domain_size=nproc,
        devices_per_node=nproc,
        domain_Bps=_sourced(bandwidth_Bps, domain_source),
        network_Bps=_sourced(bandwidth_Bps, network_source),
        domain_latency_s=_sourced(latency_s, domain_source),
        network_latency_s=_sourced(latency_s, network_source),
        times=times,
        links=links,
        domain=NetworkKind.MEMORY if kind is DeviceKind.CPU else NetworkKind.NVLINK,
        network=NetworkKind.TCP if kind is DeviceKind.CPU else NetworkKind.IB,
    )


def _memory_bytes() -> float:
    """Return the memory this process may use: the machine's, or less under a control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return float(min([total, *(int(limit) for limit in limits if limit.isdecimal())]))
