"""This machine as a hardware file: rates of compute, times of collectives, each number with how it
was got."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch

from moewright.bench.cases import Probe, build_cases, pairing_rounds
from moewright.bench.tiny_steps import TINY_SHAPES, HostWork, solve_host_work
from moewright.bench.workers import CallClock, choose_clock, run_workers
from moewright.engine.run.process_limit import count_cores, refuse_too_many_processes
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
    Op,
    OpRate,
)
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Dtype

BENCH_VERSION = (
    5  # part of the fingerprint: raise it when the same machine would be described differently
)
MIN_WORK_SHARE = 0.1  # of a call, in case the launch was measured too slow
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

CurvePoints = tuple[tuple[float, float], ...]


def measure_machine(*, nproc: int, budget_s: float = 45.0) -> Hardware:
    """Measure with `nproc` processes at once, one thread (or one GPU) each.

    Takes about `budget_s` seconds at most; a slow or busy machine loses the largest points of the
    curves, not the small ones. Work is timed by CPU time where every process has a core, so other
    jobs hardly distort it; collectives are timed by the wall. Peaks are the best GEMM rates
    measured, so MFU is a share of what torch reaches here. On a CPU, where the thread that launches
    also works, rates are those beyond a launch, which the host's time has.
    """
    kind = _kind(nproc)
    taken = run_workers(kind, ranks=nproc, budget_s=budget_s)
    points: dict[tuple[str, Dtype], list[tuple[float, float]]] = defaultdict(list)
    launch_s: dict[tuple[str, Dtype], float] = {}
    moved: dict[tuple[Collective, int], list[tuple[float, float]]] = defaultdict(list)
    pairs: dict[tuple[int, int], float] = {}
    for case, seconds in zip(build_cases(kind, nproc), taken, strict=True):
        if seconds is None:
            continue
        if isinstance(case.op, Collective):
            moved[case.op, case.ranks].append((case.x, fmean(seconds)))
        elif case.op is Probe.LINK:
            partners = pairing_rounds(nproc)[round(case.x) - 1].items()
            pairs |= {
                (a, b): case.work / fmean((seconds[a], seconds[b])) for a, b in partners if a < b
            }
        elif not case.work:
            launch_s[case.op, case.dtype] = fmean(seconds)
        else:
            working_s = max(
                fmean(seconds) - launch_s.get((case.op, case.dtype), 0.0),
                MIN_WORK_SHARE * fmean(seconds),
            )
            points[case.op, case.dtype].append((case.x, case.work / working_s))
    how = _how(kind, nproc)
    how_work = f"{how}, CPU time" if choose_clock(kind, nproc) is CallClock.THREAD else how
    curves = {key: tuple(sorted(found)) for key, found in points.items()}
    for dtype in (Dtype.BF16, Dtype.FP32):
        curves[Op.ELEMENTWISE, dtype] = _past_caches(curves, dtype)
    missing = [
        op for op in (*Op, Probe.COPY) if not any(key[0] is op and curves[key] for key in curves)
    ]
    if len(steps := [1 / y for _, y in curves.pop((Probe.STEP, Dtype.BF16), ())]) < len(
        TINY_SHAPES
    ):
        missing.append(Probe.STEP)
    if missing:
        rule = f"was too short to measure {', '.join(missing)}"
        raise BadInput(Reason(field="budget_s", value=f"{budget_s:g}", rule=rule, nearest="45"))
    name = device_name()
    return Hardware(
        name=f"{nproc} x {name}",
        count=nproc,
        device=_device(kind, nproc, name, curves, how_work),
        fabric=_fabric(
            nproc, curves, {key: tuple(sorted(found)) for key, found in moved.items()}, pairs, how
        ),
        constants=_constants(solve_host_work(steps), how_work),
        fingerprint=machine_fingerprint(nproc),
    )


def _past_caches(curves: dict[tuple[str, Dtype], CurvePoints], dtype: Dtype) -> CurvePoints:
    """The rates of passes, and beyond the largest of them that of a copy, which no cache holds."""
    found, copied = (
        curves.get(key, ()) for key in ((Op.ELEMENTWISE, dtype), (Probe.COPY, Dtype.FP32))
    )
    return (*found, *(point for point in copied if found and point[0] > found[-1][0]))


def _constants(host: HostWork, how: str) -> tuple[Constant, ...]:
    """The host's work, which the steps of models of a few columns consist of."""
    found = (
        ("host_s_per_layer_microbatch", host.layer_s, "more layers"),
        ("host_s_per_local_expert", host.expert_s, "more experts"),
        ("host_dense_layer_share", host.dense_share, "more layers without experts"),
        ("step_tail_s", host.step_s, "what is left besides layers"),
    )
    return tuple(
        Constant(name=name, value=_sourced(value, f"{how}: steps of tiny models, {what}"))
        for name, value, what in found
    )


def machine_fingerprint(nproc: int) -> str:
    """16 hex digits that change with the device, cores, memory, torch version or number of
    processes."""
    facts = (
        BENCH_VERSION,
        device_name(),
        platform.machine(),
        count_cores(),
        _ram_bytes(),
        torch.__version__,
        nproc,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def device_name() -> str:
    """The GPU's name, or the processor's as /proc/cpuinfo has it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _kind(nproc: int) -> DeviceKind:
    refuse_too_many_processes(nproc)
    if not torch.cuda.is_available():
        return DeviceKind.CPU
    gpus = torch.cuda.device_count()
    if nproc > gpus:
        rule = f"this machine has {gpus} GPUs, and a process takes one"
        raise BadInput(Reason(field="nproc", value=str(nproc), rule=rule, nearest=str(gpus)))
    return DeviceKind.CUDA


def _how(kind: DeviceKind, nproc: int) -> str:
    unit = "thread" if kind is DeviceKind.CPU else "GPU"
    together = f"{nproc} processes at once" if nproc > 1 else "one process"
    day = datetime.now(UTC).date().isoformat()
    where = f"{device_name()}, torch {torch.__version__}, {together}, 1 {unit} each"
    return f"measured {day}, {where}, lower quartile of repeats"


def _sourced(value: float, source: str) -> Sourced:
    return Sourced(value=value, kind=SourceKind.MEASURED, source=source)


def _device(
    kind: DeviceKind, nproc: int, name: str, curves: dict[tuple[str, Dtype], CurvePoints], how: str
) -> Device:
    whats = {
        Op.GEMM: "linear forward and both backward products",
        Op.GROUPED_GEMM: "experts' linear, forward and both backward products",
        Op.ATTENTION: "causal flash attention, 4 query heads a key head",
        Op.ATTENTION_BACKWARD: "causal flash attention, 4 query heads a key head",
        Op.ELEMENTWISE: "a layer's norms, rotation, residuals, permutes and SwiGLU, forward and backward; last a copy",
        Op.OPTIMIZER: "fused AdamW over flat fp32 buffers",
    }
    rates = tuple(
        OpRate(op=op, dtype=dtype, curve=_curve(curves[op, dtype], f"{how}: {what}"))
        for op, what in whats.items()
        for dtype in (Dtype.BF16, Dtype.FP32)
        if (op, dtype) in curves
    )
    peaks = tuple(
        DtypePeak(
            dtype=dtype,
            rate=_sourced(max(y for _, y in curves[Op.GEMM, dtype]), f"{how}: best GEMM rate"),
        )
        for dtype in (Dtype.BF16, Dtype.FP32)
    )
    if kind is DeviceKind.CPU:
        memory = _sourced(
            _ram_bytes() / nproc, f"memory of the machine or its control group / {nproc} processes"
        )
    else:
        memory = _sourced(float(torch.cuda.mem_get_info(0)[1]), "total memory by the CUDA driver")
    return Device(
        name=name,
        kind=kind,
        memory_bytes=memory,
        memory_Bps=_sourced(
            curves[Probe.COPY, Dtype.FP32][0][1], f"{how}: copy of 64 MiB, read and written"
        ),
        peaks=peaks,
        rates=rates,
    )


def _fabric(
    nproc: int,
    curves: dict[tuple[str, Dtype], CurvePoints],
    moved: dict[tuple[Collective, int], CurvePoints],
    pairs: dict[tuple[int, int], float],
    how: str,
) -> Fabric:
    """One domain: the machine. Bandwidth is what leaves a rank in the largest all-to-all, latency
    its smallest one."""
    times = tuple(
        CollectiveTime(
            op=op, group_size=size, curve=_curve(points, f"{how}: {op} in groups of {size}")
        )
        for (op, size), points in sorted(
            moved.items(), key=lambda pair: (pair[0][1], list(Collective).index(pair[0][0]))
        )
    )
    source = f"{how}: exchange of 4 MiB, all pairs of a round at once"
    links = tuple(
        Link(first=a, second=b, Bps=_sourced(rate, source))
        for (a, b), rate in sorted(pairs.items())
    )
    if nproc > 1:
        exchange = moved[Collective.ALL_TO_ALL, nproc]
        payload_bytes, largest_s = exchange[-1]
        bandwidth_Bps, latency_s = payload_bytes * (nproc - 1) / nproc / largest_s, exchange[0][1]
        source = f"{how}: all-to-all of {payload_bytes:.0f} and of {exchange[0][0]:.0f} bytes"
    else:
        bandwidth_Bps, latency_s = curves[Probe.COPY, Dtype.FP32][0][1], 0.0
        source = f"{how}: one process sends nothing; the rate of a copy stands here"
    outside = f"{source}; one machine has no network, the same figure stands here"
    return Fabric(
        domain_size=nproc,
        devices_per_node=nproc,
        domain_Bps=_sourced(bandwidth_Bps, source),
        network_Bps=_sourced(bandwidth_Bps, outside),
        domain_latency_s=_sourced(latency_s, source),
        network_latency_s=_sourced(latency_s, outside),
        times=times,
        links=links,
    )


def _curve(points: CurvePoints, source: str) -> Curve:
    return Curve(points=points, kind=SourceKind.MEASURED, source=source)


def _ram_bytes() -> float:
    """Memory this process may use: the machine's, or less where a control group holds it down."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return float(min([total, *(int(limit) for limit in limits if limit.isdecimal())]))
