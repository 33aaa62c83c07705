"""`moewright bench`: measure this machine and write its hardware file; the speed of planner and
engine."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

GIGA = 10**9


def bench_machine(
    *,
    nproc: int = 2,
    out: Path = Path("runs/machine.toml"),
    force: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure GEMM, grouped GEMM, attention and collectives here, in under a minute, and write a
    hardware file.

    Parameters
    ----------
    nproc
        Processes the collectives are measured over.
    out
        The hardware file to write; when it is there and of this machine, nothing is measured.
    force
        Measure again even so.
    """

    from moewright.engine.run.process_limit import refuse_too_many_processes

    refuse_too_many_processes(nproc, field="--nproc")
    if out.exists() and not force and _is_of_this_machine(out, nproc=nproc):
        print(f"{out} is of this machine already; --force measures again")
    else:
        write_machine_file(out, nproc=nproc)
    _print_bandwidths(out)
    return 0


def _print_bandwidths(path: Path) -> None:
    """What nccl-tests would say of the largest message of each collective and group size, and which
    link is slow."""
    from moewright.codec import read_toml
    from moewright.diagnosis.bandwidth import compute_bandwidths, find_slow_links
    from moewright.spec.hardware import Hardware
    from moewright.spec.units import format_bytes, format_seconds

    hardware = read_toml(Hardware, path)
    for one in compute_bandwidths(hardware):
        rate = f"algorithm {one.algorithm_Bps / GIGA:.3g} GB/s, bus {one.bus_Bps / GIGA:.3g} GB/s"
        size = f"{format_bytes(one.payload_bytes)} in {format_seconds(one.seconds)}"
        note = "  SLOW beside the others" if one.is_slow else ""
        print(f"{one.op:<16}{one.group_size:>4} ranks  {size:<24}{rate}{note}")
    for slow in find_slow_links(hardware):
        link, beside = slow.link, f"{slow.typical_Bps / GIGA:.3g} GB/s between most"
        port = f"; rank {slow.rank} is on more of them" if slow.rank >= 0 else ""
        pair = f"SLOW link between ranks {link.first} and {link.second}"
        print(f"{pair}: {link.Bps.value / GIGA:.3g} GB/s each way, {beside}{port}")


def bench_search() -> int:
    """Search large models over many devices, and print how many layouts a second are scored, beside
    other planners."""
    from moewright.bench.search_speed import COUNTING_RULE, PEER_PLANNERS, measure_search_rates

    print(f"{'search':<34}{'wall':>9}{'layouts':>13}{'a second and core':>20}")
    for rate in measure_search_rates():
        case = f"{rate.model} on {rate.hardware}"
        print(
            f"{case:<34}{rate.wall_s:>7.2f} s{rate.layouts:>13,}{rate.per_core_s:>20,.0f}",
            flush=True,
        )
    print(COUNTING_RULE)
    print("other planners, measured on a machine of two cores:")
    for rival in PEER_PLANNERS:
        print(f"{rival.name:<34}{'':>22}{rival.layouts_per_s:>20}  {rival.what}")
    return 0


def bench_engine(*, nproc: int = 2) -> int:
    """Time the engine beside a plain PyTorch loop over the same modules, and ZeRO-1 with overlap
    beside without.

    Parameters
    ----------
    nproc
        Processes for the second; 1 leaves it out.
    """
    from moewright.engine.run.process_limit import refuse_too_many_processes

    refuse_too_many_processes(nproc, field="--nproc")
    import torch

    from moewright.bench.overhead import WORKLOAD, measure_overhead, measure_overlap_ratio
    from moewright.spec.hardware import DeviceKind

    kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    if kind is DeviceKind.CUDA and nproc > torch.cuda.device_count():
        nproc = 1
    # The ranks first: they are forked, and this process has started no thread of torch's yet.
    ratio = measure_overlap_ratio(kind, nproc) if nproc > 1 else None
    found = measure_overhead(
        torch.device("cuda", 0) if kind is DeviceKind.CUDA else torch.device("cpu")
    )
    tokens = WORKLOAD.tokens_per_step
    print(f"{'one process, TP 1':<26}{'step':>10}{'tokens/s':>11}{'host outside torch ops':>25}")
    for name, step_s, outside_s in (
        ("engine", found.engine_s, found.engine_outside_s),
        ("plain PyTorch loop", found.plain_s, found.plain_outside_s),
    ):
        print(
            f"{name:<26}{step_s * 1e3:>7.1f} ms{tokens / step_s:>11,.0f}{outside_s * 1e3:>22.1f} ms"
        )
    print(f"engine over plain: {found.ratio:.3f} of the tokens/s")
    if ratio is not None:
        print(
            f"ZeRO-1 over {nproc} processes: overlap=grad+param gives {ratio:.3f} of the tokens/s without"
        )
    return 0


def bench_peers(*, threads: int = 0, folder: Path = Path("runs/peers")) -> int:
    """Time the engine beside other MoE trainers, turn by turn: the whole step and the MoE layer, in
    bf16 and fp32.

    Parameters
    ----------
    threads
        Of each contestant; 0 takes all cores.
    folder
        Where the peers are installed, each into an environment of its own.
    """
    from moewright.bench.contest import ENGINE, GEMM, PEERS, prepare_environment, run_contest
    from moewright.bench.peers.contest import WORKLOAD, ContestPart, model_flops
    from moewright.spec.workload import Dtype

    ready = {ENGINE: prepare_environment(ENGINE, folder), GEMM: prepare_environment(GEMM, folder)}
    for peer in PEERS:
        try:
            ready[peer] = prepare_environment(peer, folder)
        except BadInput as absent:
            print(f"left out: {absent}")
    for part in ContestPart:
        for dtype in (Dtype.BF16, Dtype.FP32):
            turns, split = run_contest(
                ready,
                part=part,
                dtype=dtype,
                threads=threads or os.cpu_count() or 1,
                environment=os.environ,
            )
            ours = next(one for one in turns if one.name == ENGINE.name)
            best = statistics.median(next(one for one in turns if one.name == GEMM.name).values)
            print(f"{part} in {dtype}; best GEMM {best / GIGA:.0f} GFLOP/s")
            print(
                f"{'':<34}{'median':>10}{'tokens/s':>10}{'of GEMM':>9}  moewright is faster, paired"
            )
            for one in turns:
                if one.name == GEMM.name:
                    continue
                share = model_flops(part) / one.median_s / best
                paired = (
                    ""
                    if one is ours
                    else "{:.2f}x ({:.2f} to {:.2f})".format(*ours.speedup_over(one))
                )
                rate = WORKLOAD.tokens_per_step / one.median_s
                print(
                    f"{one.name:<34}{one.median_s * 1e3:>7.0f} ms{rate:>10,.0f}{share:>9.1%}  {paired}",
                    flush=True,
                )
            total = sum(split.values())
            print(
                "where ours goes: "
                + ", ".join(f"{kind} {value / total:.0%}" for kind, value in split.items())
            )
    return 0


def write_machine_file(path: Path, *, nproc: int) -> None:
    """Measure with `nproc` processes and write the hardware file. A path it cannot go to is refused
    first."""
    from moewright.bench.machine import measure_machine
    from moewright.codec import write_text, write_toml

    if path.suffix != ".toml":
        rule = "a hardware file is TOML, and is known by its name"
        raise BadInput(
            Reason(
                field="--out", value=str(path), rule=rule, nearest=str(path.with_suffix(".toml"))
            )
        )
    if not path.exists():
        write_text(path, "")  # refuses what cannot be written now rather than when all is measured
        path.unlink()
    started = time.monotonic()
    hardware = measure_machine(nproc=nproc)
    write_toml(path, hardware)
    peaks = ", ".join(
        f"{peak.dtype} {peak.rate.value / GIGA:.3g}" for peak in hardware.device.peaks
    )
    print(f"{hardware.name}: best GEMM a process in GFLOP/s: {peaks}")
    print(f"wrote {path} after {time.monotonic() - started:.0f} s", flush=True)


def _is_of_this_machine(path: Path, *, nproc: int) -> bool:
    from moewright.bench.machine import machine_fingerprint
    from moewright.codec import read_toml
    from moewright.spec.hardware import Hardware

    return read_toml(Hardware, path).fingerprint == machine_fingerprint(nproc)
