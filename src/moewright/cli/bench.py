"""`moewright bench machine`: measure this machine and write its hardware file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

BUDGET_S = 60.0


def bench_machine(
    *,
    nproc: int = 2,
    out: Path = Path("runs/machine.toml"),
    force: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure GEMM, grouped GEMM, attention and collectives here, in under a minute, and write a hardware file.

    Parameters
    ----------
    nproc
        Processes the collectives are measured over.
    out
        The hardware file to write; when it is there and of this machine, nothing is measured.
    force
        Measure again even so.
    """
    from moewright.spec.errors import BadInput, Reason

    if nproc < 1:
        raise BadInput(Reason(field="--nproc", value=str(nproc), rule="must be at least 1", nearest="1"))
    if out.exists() and not force:
        print(f"{out} is there already; --force measures again")
        return 0
    measure_to(out, nproc=nproc)
    return 0


def measure_to(path: Path, *, nproc: int) -> None:
    """Measure with `nproc` processes and write the hardware file."""
    from moewright.bench.machine import measure
    from moewright.codec import write_toml

    write_toml(path, measure(nproc=nproc, budget_s=BUDGET_S))
    print(f"wrote {path}")
