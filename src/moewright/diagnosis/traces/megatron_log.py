"""Console logs of Megatron-LM and Megatron-Bridge: steps, rates, the dump of arguments, memory
reports, failures.

Lines as megatron/training/training.py prints them. A log may be interleaved from many ranks, carry
the prefixes of launchers, and break off anywhere; what is not recognised is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from moewright.diagnosis.traces.megatron_timers import Timer, read_timers
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import GB, GIB, MIB, TERA

WARM_UP_SHARE = 0.2  # of the iterations seen, at most ten: autotuning, communicators, caches
_ITERATION = re.compile(r"iteration[ =]+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_PAIR = re.compile(r"\s*([^|:=]+?)\s*[:=]\s*([-+]?[\d.,]+(?:[eE][-+]?\d+)?|nan|inf|-inf)\b")
_ARGUMENT = re.compile(r"(?:^|[\s\]:])([a-z][a-z0-9_]*) \.{2,} ?(.*?)\s*$")
_MEMORY = re.compile(r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \((MB|GB)\) \|(.*)")
_MEMORY_PAIR = re.compile(r"(?:mem-)?((?:max[ -])?(?:allocated|reserved))(?:-\w+)?\s*:\s*([\d.]+)")
_OUT = re.compile(
    r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory|Failed to CUDA calloc",
    re.IGNORECASE,
)
_OUT_SIZE = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB)")
_OUT_HELD = re.compile(r"total capacity of ([\d.]+) GiB|([\d.]+) GiB total capacity")
_LOSS_KEYS = ("lm loss", "loss", "reduced train loss")
_ELAPSED = (
    "elapsed time per iteration (ms)",
    "elapsed time per iteration ms",
    "elapsed time per iteration [ms]",
)
_RATES = ("throughput per GPU (TFLOP/s/GPU)", "compute per GPU (TFLOP/s/GPU)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One line; 0 and NaN stand for what it does not say."""

    number: int
    step_s: float
    tflops_per_device: float
    global_batch: int
    loss: float
    grad_norm: float
    skipped: int
    nan_losses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes of torch's allocator on one rank; 0: not said."""

    rank: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A failed allocation. `capacity_bytes` is the device's; 0: not said."""

    line: int
    requested_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLog:
    iterations: tuple[Iteration, ...]
    arguments: tuple[
        tuple[str, str], ...
    ]  # as dumped: name with underscores, value as Python prints it
    memory_reports: tuple[MemoryReport, ...]
    failures: tuple[OutOfMemory, ...]
    timers: Mapping[str, Timer]  # by Megatron's names; empty: none printed

    def find_argument(self, name: str) -> str:
        """The value of one argument; "" when it was not dumped."""
        return next((value for have, value in self.arguments if have == name), "")

    @property
    def steady_iterations(self) -> tuple[Iteration, ...]:
        """Iterations after warm-up that were not skipped."""
        timed = [each for each in self.iterations if each.step_s > 0]
        first = _warm(len(timed))
        return tuple(each for each in timed[first:] if not each.skipped) or tuple(timed[first:])

    @property
    def step_s(self) -> float:
        """Median seconds of a settled iteration; 0: none was timed."""
        return median([each.step_s for each in self.steady_iterations] or [0.0])

    @property
    def tflops_per_device(self) -> float:
        """Median of what the trainer printed, model FLOPs by its own count; 0: not printed."""
        return median(
            [
                each.tflops_per_device
                for each in self.steady_iterations
                if each.tflops_per_device > 0
            ]
            or [0.0]
        )


def _warm(count: int) -> int:
    """How many of `count` iterations are warm-up."""
    return min(10, max(1 if count > 1 else 0, int(WARM_UP_SHARE * count)))


def read_log(path: Path) -> MegatronLog:
    """Raises BadInput when the file holds neither an iteration, nor an argument, nor a failed
    allocation."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise BadInput(
            Reason(field=str(path), rule=f"cannot be read: {error.strerror or error}")
        ) from None
    found = parse_log(text)
    if not (found.iterations or found.arguments or found.failures):
        rule = "is not a log of Megatron-LM: no line with an iteration, an argument or a failed allocation"
        raise BadInput(
            Reason(field=str(path), rule=rule, nearest="the console output of pretrain_gpt.py")
        )
    return found


def parse_log(text: str) -> MegatronLog:
    """A log's text. An iteration that several ranks print, or that a restart does over, is kept as
    printed last."""
    iterations: dict[int, Iteration] = {}
    arguments: dict[str, str] = {}
    memory: dict[int, MemoryReport] = {}
    failures: list[OutOfMemory] = []
    lines = re.split(r"[\r\n]+", text)
    for number, line in enumerate(lines, 1):
        if found := _ITERATION.search(line):
            iterations[int(found[1])] = _iteration(int(found[1]), found[3])
        for report in _MEMORY.finditer(line):
            memory[int(report[1])] = _report(int(report[1]), report[3], report[4])
        if _OUT.search(line):
            failures.append(_failure(number, line))
        elif " ..." in line and (said := _ARGUMENT.search(line)):
            arguments.setdefault(said[1], said[2])
    return MegatronLog(
        iterations=tuple(iterations[number] for number in sorted(iterations)),
        arguments=tuple(arguments.items()),
        memory_reports=tuple(memory[rank] for rank in sorted(memory)),
        failures=tuple(failures),
        timers=read_timers(lines, _warm(len(iterations))),
    )


def _iteration(number: int, rest: str) -> Iteration:
    said: dict[str, float] = {}
    for piece in rest.split("|"):
        if found := _PAIR.match(piece):
            said[found[1].strip().replace("_", " ")] = float(found[2].replace(",", ""))
    elapsed = next((said[key] for key in _ELAPSED if key in said), 0.0)
    return Iteration(
        number=number,
        step_s=elapsed / 1e3,
        tflops_per_device=next((said[key] for key in _RATES if key in said), 0.0),
        global_batch=int(said.get("global batch size", 0)),
        loss=next((said[key] for key in _LOSS_KEYS if key in said), float("nan")),
        grad_norm=said.get("grad norm", float("nan")),
        skipped=int(said.get("number of skipped iterations", 0)),
        nan_losses=int(said.get("number of nan iterations", 0)),
    )


def _report(rank: int, unit: str, rest: str) -> MemoryReport:
    """Megatron-LM's "MB" are 2**20 bytes; Megatron-Bridge's "GB" are 1e9 and its keys are
    mem-allocated-gigabytes."""
    scale = MIB if unit == "MB" else GB
    said = {
        key.replace("-", " "): round(float(value) * scale)
        for key, value in _MEMORY_PAIR.findall(rest)
    }
    return MemoryReport(
        rank=rank,
        allocated_bytes=said.get("allocated", 0),
        max_allocated_bytes=said.get("max allocated", 0),
        reserved_bytes=said.get("reserved", 0),
        max_reserved_bytes=said.get("max reserved", 0),
    )


def _failure(number: int, line: str) -> OutOfMemory:
    scales = {"GiB": GIB, "MiB": MIB, "KiB": 1024}
    wanted, held = _OUT_SIZE.search(line), _OUT_HELD.search(line)
    return OutOfMemory(
        line=number,
        requested_bytes=round(float(wanted[1]) * scales[wanted[2]]) if wanted else 0,
        capacity_bytes=round(float(held[1] or held[2]) * GIB) if held else 0,
    )


def printed_flops_per_token(log: MegatronLog, *, seq_len: int, devices: int) -> float:
    """What the trainer takes a token to cost, from its own rate; 0: it did not print one."""
    batch = next((each.global_batch for each in log.steady_iterations if each.global_batch), 0)
    tokens_per_s = batch * seq_len / log.step_s if log.step_s else 0.0
    return log.tflops_per_device * TERA * devices / tokens_per_s if tokens_per_s else 0.0
