"""`python -m benchmarks.peers`: the engine beside other MoE trainers, turn by turn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.command import run_command
from benchmarks.peers.contest import (
    ENGINE,
    GEMM,
    PEERS,
    Contestant,
    TurnTimes,
    prepare_environment,
    run_contest,
)
from benchmarks.peers.protocol import ContestPart, model_flops
from benchmarks.workloads import CONTEST_WORKLOAD
from moewright.spec.errors import BadInput
from moewright.spec.workload import Dtype

_GIGA = 10**9


def compare_trainers(*, threads: int = 0, folder: Path = Path("runs/peers")) -> int:
    """Time the whole step and the MoE layer of each trainer in bf16 and fp32, turn by turn.

    Parameters
    ----------
    threads
        Threads of each contestant; 0 takes all cores.
    folder
        Where the peers are installed, each into an environment of its own.
    """
    pythons = _prepare_contestants(folder)
    for part in ContestPart:
        for dtype in (Dtype.BF16, Dtype.FP32):
            times, engine_split = run_contest(
                pythons,
                part=part,
                dtype=dtype,
                threads=threads or os.cpu_count() or 1,
                environment=os.environ,
            )
            _print_times(part, dtype, {item.name: item for item in times})
            _print_split(engine_split)
    return 0


def _prepare_contestants(folder: Path) -> Mapping[Contestant, Path]:
    """Return the Python of each contestant; a peer that cannot be had is left out by name."""
    pythons = {contestant: prepare_environment(contestant, folder) for contestant in (ENGINE, GEMM)}
    for peer in PEERS:
        try:
            pythons[peer] = prepare_environment(peer, folder)
        except BadInput as error:
            print(f"left out: {error}")
    return pythons


def _print_times(part: ContestPart, dtype: Dtype, times: Mapping[str, TurnTimes]) -> None:
    best_gemm = times[GEMM.name].median_value
    engine = times[ENGINE.name]
    print(f"{part} in {dtype}; best GEMM {best_gemm / _GIGA:.0f} GFLOP/s")
    print(f"{'':<34}{'median':>10}{'tokens/s':>10}{'of GEMM':>9}  moewright is faster, paired")
    for name, trainer in times.items():
        if name == GEMM.name:
            continue
        speedup = ""
        if trainer is not engine:
            median, least, most = engine.speedup_over(trainer)
            speedup = f"{median:.2f}x ({least:.2f} to {most:.2f})"
        tokens_per_s = CONTEST_WORKLOAD.tokens_per_step / trainer.median_s
        of_gemm = model_flops(part) / trainer.median_s / best_gemm
        print(
            f"{name:<34}{trainer.median_s * 1e3:>7.0f} ms{tokens_per_s:>10,.0f}"
            f"{of_gemm:>9.1%}  {speedup}",
            flush=True,
        )


def _print_split(split: Mapping[str, float]) -> None:
    total = sum(split.values())
    shares = (f"{kind} {seconds / total:.0%}" for kind, seconds in split.items())
    print(f"the engine's time: {', '.join(shares)}")


if __name__ == "__main__":
    run_command("benchmarks.peers", compare_trainers)
