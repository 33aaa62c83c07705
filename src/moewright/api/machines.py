"""Hardware files of this machine: measured where they are missing, read where they are there."""

from __future__ import annotations

import time
from pathlib import Path

from moewright.codec import read_toml, write_text, write_toml
from moewright.intake import catalogue
from moewright.intake.job import JobFile
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.options import Tell
from moewright.spec.units import GIGA, format_figures


def check_hardware_path(path: Path) -> None:
    """Raise BadInput where a hardware file of that name would not be read as one."""
    if path.suffix != ".toml":
        rule = "a hardware file is TOML, and is known by its name"
        nearest = str(path.with_suffix(".toml")) if path.name else "hardware.toml"
        raise BadInput(Reason(field="--out", value=str(path), rule=rule, nearest=nearest))


def write_machine_file(path: Path, *, nproc: int, tell: Tell) -> None:
    """Measure this machine with `nproc` processes and write its hardware file.

    Raises:
        BadInput: the file cannot be written, which is found out before anything is measured.
    """
    from moewright.bench.machine import measure_machine

    check_hardware_path(path)
    if not path.exists():
        # Writes nothing of use, but fails where the file cannot be written.
        write_text(path, "")
        path.unlink()
    started = time.monotonic()
    hardware = measure_machine(nproc=nproc)
    write_toml(path, hardware)
    peaks = ", ".join(
        f"{peak.dtype} {format_figures(peak.rate.value / GIGA)}" for peak in hardware.device.peaks
    )
    tell(f"{hardware.name}: best GEMM a process in GFLOP/s: {peaks}")
    tell(f"wrote {path} after {time.monotonic() - started:.0f} s")


def describes_this_machine(path: Path, *, nproc: int) -> bool:
    """Tell whether a hardware file was measured on this machine with as many processes."""
    from moewright.bench.machine import machine_fingerprint

    return read_toml(Hardware, path).fingerprint == machine_fingerprint(nproc)


def is_unmeasured(job: JobFile) -> bool:
    """Tell whether a job names a hardware file that does not exist yet."""
    path = Path(job.hardware)
    return path.suffix == ".toml" and not path.exists()


def measure_unmeasured(job: JobFile, tell: Tell) -> None:
    """Measure this machine where the job's hardware file does not exist yet."""
    if is_unmeasured(job):
        path = Path(job.hardware)
        tell(f"{path} does not exist: measuring this machine")
        write_machine_file(path, nproc=job.nproc, tell=tell)


def read_job_hardware(job: JobFile) -> Hardware:
    """Return the hardware that a job names, as many devices as the job has ranks."""
    return catalogue.hardware(f"{job.nproc}x{job.hardware}", job.network)
