"""`moewright bench machine` and `search`: this machine's hardware file, the planner's speed."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import print_now
from moewright.cli.options import Count, Flag

GIGA = 10**9


def bench_machine(
    *,
    nproc: Count = 2,
    out: Path = Path("runs/machine.toml"),
    force: Flag = False,
) -> int:
    """Measure GEMMs, attention and collectives in under a minute, and write a hardware file.

    Parameters
    ----------
    nproc
        Processes over which the collectives are measured.
    out
        The hardware file to write; when it exists and describes this machine, nothing is measured.
    force
        Measure again even so.
    """
    from moewright.api.machines import describes_this_machine, write_machine_file
    from moewright.engine.run.process_limit import refuse_too_many_processes

    refuse_too_many_processes(nproc, field="--nproc")
    if out.exists() and not force and describes_this_machine(out, nproc=nproc):
        print(f"{out} describes this machine already; --force measures it again")
    else:
        write_machine_file(out, nproc=nproc, tell=print_now)
    _print_bandwidths(out)
    return 0


def bench_search() -> int:
    """Search large models over many devices, and print how many layouts are scored a second.

    The rates of other planners are printed beside.
    """
    from moewright.bench.search_speed import (
        COUNTING_RULE,
        PEER_PLANNERS,
        measure_search_rates,
    )

    print(f"{'search':<34}{'wall':>9}{'layouts':>13}{'a second and core':>20}")
    for rate in measure_search_rates():
        case = f"{rate.model} on {rate.hardware}"
        figures = f"{rate.wall_s:>7.2f} s{rate.layouts:>13,}{rate.per_core_s:>20,.0f}"
        print(f"{case:<34}{figures}", flush=True)
    print(COUNTING_RULE)
    print("other planners, measured on a machine of two cores:")
    for planner in PEER_PLANNERS:
        print(f"{planner.name:<34}{'':>22}{planner.layouts_per_s:>20}  {planner.what}")
    return 0


def _print_bandwidths(path: Path) -> None:
    """Print what nccl-tests would say of the largest messages, and which links are slow."""
    from moewright.codec import read_toml
    from moewright.diagnosis.bandwidth import compute_bandwidths, find_slow_links
    from moewright.spec.hardware import Hardware
    from moewright.spec.units import format_bytes, format_seconds

    hardware = read_toml(Hardware, path)
    for bandwidth in compute_bandwidths(hardware):
        size = f"{format_bytes(bandwidth.payload_bytes)} in {format_seconds(bandwidth.seconds)}"
        line = (
            f"{bandwidth.op:<16}{bandwidth.group_size:>4} ranks  {size:<24}"
            f"algorithm {bandwidth.algorithm_Bps / GIGA:.3g} GB/s, "
            f"bus {bandwidth.bus_Bps / GIGA:.3g} GB/s"
        )
        if bandwidth.is_slow:
            line += "  SLOW beside the others"
        print(line)
    for slow in find_slow_links(hardware):
        line = (
            f"SLOW link between ranks {slow.link.first} and {slow.link.second}: "
            f"{slow.link.Bps.value / GIGA:.3g} GB/s each way, "
            f"{slow.typical_Bps / GIGA:.3g} GB/s between most"
        )
        if slow.rank >= 0:
            line += f"; rank {slow.rank} is on more of them"
        print(line)
