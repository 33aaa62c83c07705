"""Console logs of Megatron-LM, Megatron-Bridge and GPT-NeoX, and the records of MLPerf.

They hold steps, rates, the dump of arguments, memory reports and failures, in lines as
megatron/training/training.py prints them. A log may be interleaved from many ranks, carry the
prefixes of launchers, and break off anywhere; what is not recognised is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moewright.codec import read_bytes
from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces.foreign_logs import (
    MLPERF_MARK,
    read_mlperf_sizes,
    read_mlperf_steps,
    read_neox_sizes,
)
from moewright.diagnosis.traces.megatron_timers import (
    Timer,
    TimerBlock,
    median_timers,
    read_timer_blocks,
    split_lines,
    sum_timers,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import GB, GIB, MIB, TERA, divide, is_whole_number

# Share of the iterations seen that is warm-up (autotuning, communicators, caches).
WARM_UP_SHARE = 0.2
_MAX_WARM_UP = 10
STEP_DIGITS = 15  # at most, of a step's number: a float has it exactly
_STEP = rf"(\d{{1,{STEP_DIGITS}}})"
_ITERATION = re.compile(rf"iteration[ =]+{_STEP}\s*/\s*{_STEP}\s*\|(.*)")
# A number that float() reads once its commas are gone, and nothing that only begins like one: a
# version ("1.2.3") is none.
_UNSIGNED = r"\d+(?:\.\d*)?(?![\w.])"
_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])"
_VALUE = re.compile(rf"\s*([^|:=]+?)\s*[:=]\s*({_NUMBER}|[-+]?(?:nan|inf)\b)")
# Megatron-Bridge prints a line of its own before that of an iteration; whatever its options are.
_STEP_TIME = re.compile(
    r"Step Time\s*:\s*([\d.]+)s\b(?:.*?utilization:\s*([\d.]+)\s*(?:MODEL_)?TFLOP/s/GPU)?"
)
_RATE_ALONE = re.compile(rf"({_UNSIGNED})\s*(?:MODEL_)?TFLOP/s/GPU")
_ARGUMENT = re.compile(r"(?:^|[\s\]:])([a-z][a-z0-9_]*) \.{2,} ?(.*?)\s*$")
_MEMORY = re.compile(
    r"\[Rank (\d{1,9})\] \(after (\d+) iterations\) memory \((MB|GB)\) \|"
    # another rank's report may follow on the same line
    r"((?:(?!\[Rank \d).)*)"
)
_MEMORY_VALUE = re.compile(
    rf"(?:mem-)?((?:max[ -])?(?:allocated|reserved))(?:-\w+)?\s*:\s*({_UNSIGNED})"
)
_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory|Failed to CUDA calloc",
    re.IGNORECASE,
)
_REQUESTED = re.compile(rf"Tried to allocate ({_UNSIGNED}) (GiB|MiB|KiB)")
_CAPACITY = re.compile(rf"total capacity of ({_UNSIGNED}) GiB|({_UNSIGNED}) GiB total capacity")
_BALANCE = re.compile(r"load_balancing_loss|z_loss:|moe_aux")
_SCALES = {"GiB": GIB, "MiB": MIB, "KiB": 1024}
_BATCH_KEYS = ("global batch size", "gloabl batch size")  # AscendSpeed's; codespell:ignore
_LOSS_KEYS = ("lm loss", "loss", "reduced train loss")
_ELAPSED = (
    "elapsed time per iteration (ms)",
    "elapsed time per iteration ms",
    "elapsed time per iteration [ms]",
)
_ELAPSED_SECONDS = ("elapsed time per iteration (s)", "elapsed time per iteration s")
# What GPT-NeoX prints before and behind an iteration.
_NEOX_SAMPLES = re.compile(r"samples/sec: (\d+\.\d+) \|")
_NEOX_RATE = re.compile(r"approx flops per GPU: (\d+\.\d+)TFLOPS")
_NEOX_RECOMPUTED = 3 / 4  # of the FLOPs that it counts, where it recomputes
_RATES = (
    "throughput per GPU (TFLOP/s/GPU)",
    "compute per GPU (TFLOP/s/GPU)",
    "TFLOPs",  # Megatron-DeepSpeed
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """An iteration as its line says; 0 and NaN stand for what it does not say."""

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

    @property
    def peak_bytes(self) -> int:
        """Return the most that the allocator held, else the most that it gave out."""
        return self.max_reserved_bytes or self.max_allocated_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A failed allocation; `capacity_bytes` is the device's. 0: not said."""

    line: int
    requested_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLog:
    """The contents of a log.

    `arguments` are as dumped: the name with underscores, the value as Python prints it. `timers`
    are by Megatron's names, and empty where none was printed; `timer_blocks` are those of each
    iteration that was timed. `sizes` are what another trainer's log states, by Megatron's names.
    """

    iterations: tuple[Iteration, ...]
    arguments: tuple[tuple[str, str], ...]
    memory_reports: tuple[MemoryReport, ...]
    failures: tuple[OutOfMemory, ...]
    timers: Mapping[str, Timer]
    timer_blocks: tuple[TimerBlock, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    prints_balance: bool = False  # a loss that balances experts is among what lines print

    def find_argument(self, name: str) -> str:
        """Return the value of an argument; "" when it was not dumped."""
        return next((value for dumped, value in self.arguments if dumped == name), "")

    def find_size(self, name: str) -> int | None:
        """Return a whole number that the log states of its job; None where it does not.

        Of the batch the lines of its iterations come before its arguments, which have the one that
        a schedule begins with.
        """
        if name == "global_batch_size":
            is_growing = self.find_argument("step_batch_size_schedule") not in ("", "None")
            if self.global_batch or is_growing:
                return self.global_batch or None
        text = self.find_argument(name)
        return int(text) if is_whole_number(text) else self.sizes.get(name)

    @property
    def global_batch(self) -> int:
        """Return the global batch of the steady iterations; 0: not said, or it grows."""
        batches = {iteration.global_batch for iteration in self.steady_iterations} - {0}
        return batches.pop() if len(batches) == 1 else 0

    @property
    def options(self) -> frozenset[str]:
        """Return the options that the dumped arguments switch on, as they are spelt in a script."""
        return frozenset(
            f"--{name.replace('_', '-')}"
            for name, value in self.arguments
            if value not in ("False", "None", "")
        )

    @property
    def has_experts(self) -> bool | None:
        """Return whether the model has experts; None where nothing tells it."""
        if experts := self.find_argument("num_experts"):
            return experts != "None"
        return True if self.prints_balance or self.sizes.get("num_experts") else None

    @property
    def steady_iterations(self) -> tuple[Iteration, ...]:
        """Return the iterations after warm-up that were not skipped; all of them if all were."""
        timed = [iteration for iteration in self.iterations if iteration.step_s > 0]
        after_warm_up = timed[_warm_up_iterations(len(timed)) :]
        steady = tuple(iteration for iteration in after_warm_up if not iteration.skipped)
        return steady or tuple(after_warm_up)

    @property
    def step_s(self) -> float:
        """Return the median seconds of a steady iteration; 0: none was timed.

        Where no iteration has a line, the timers say how long it took.
        """
        if not self.steady_iterations and self.timer_blocks:
            first = _warm_up_iterations(len(self.timer_blocks))
            return median(self.steps_s[first:] or self.steps_s)
        return median([iteration.step_s for iteration in self.steady_iterations] or [0.0])

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Return the seconds of every iteration in order; by its timers where none has a line."""
        if self.iterations:
            return tuple(i.step_s for i in self.iterations if i.step_s > 0)
        return tuple(map(sum_timers, self.timer_blocks))

    @property
    def tflops_per_device(self) -> float:
        """Return the median rate that the trainer printed, model FLOPs by its count; 0: none."""
        rates = [iteration.tflops_per_device for iteration in self.steady_iterations]
        return median([rate for rate in rates if rate > 0] or [0.0])


def _warm_up_iterations(count: int) -> int:
    """Return how many of `count` iterations are warm-up."""
    fewest = 1 if count > 1 else 0
    return min(_MAX_WARM_UP, max(fewest, int(WARM_UP_SHARE * count)))


@read_apart
def read_log(path: Path) -> MegatronLog:
    """Read a log.

    Raises:
        BadInput: the file holds no iteration, no timer, no argument and no failed allocation.
    """
    content = read_bytes(path)
    with budget(str(path), file_bytes=len(content)):
        log = parse_log(content.decode("utf-8", errors="replace"))
    parts = (log.iterations, log.timers, log.arguments, log.failures, log.memory_reports, log.sizes)
    if not any(parts):
        rule = (
            "is not a log of Megatron-LM, Megatron Bridge, GPT-NeoX or MLPerf: "
            "no line with an iteration, an argument or a failed allocation"
        )
        nearest = "the console output of pretrain_gpt.py"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    return log


def parse_log(text: str) -> MegatronLog:
    """Parse the text of a log.

    Of an iteration that several ranks print, or that a start goes back to, the last line counts.
    """
    iterations: list[Iteration] = []
    arguments: dict[str, str] = {}
    memory_reports: dict[int, MemoryReport] = {}
    failures: list[OutOfMemory] = []
    step_times: list[Iteration] = []
    announced: Iteration | None = None
    lines = split_lines(text)
    for number, line in enumerate(lines, 1):
        if match := _STEP_TIME.search(line):
            announced = _parse_step_time(len(step_times) + 1, match)
            step_times += [announced] if announced else []
        elif match := _ITERATION.search(line):
            iteration = _with_samples(_parse_iteration(int(match[1]), match[3]), line)
            iterations.append(_with_step_time(iteration, announced))
            announced = None
        for report in _MEMORY.finditer(line):
            rank = int(report[1])
            parsed = _parse_memory_report(rank, report[3], report[4])
            if rank not in memory_reports or parsed.peak_bytes >= memory_reports[rank].peak_bytes:
                memory_reports[rank] = parsed
        if _OUT_OF_MEMORY.search(line):
            failures.append(_parse_failure(number, line))
        elif " ..." in line and (argument := _ARGUMENT.search(line)):
            arguments.setdefault(argument[1], argument[2])
    neox_sizes = read_neox_sizes(arguments)
    if neox_sizes is not None:
        iterations = _count_model_flops(iterations, arguments)
        arguments = {}
    sizes, records = _read_mlperf(text)
    timer_blocks = read_timer_blocks(lines)
    kept = find_latest([iteration.number for iteration in iterations])
    ordered = tuple(iterations[place] for place in kept.tolist())
    return MegatronLog(
        iterations=ordered or tuple(step_times) or records,
        arguments=tuple(arguments.items()),
        memory_reports=tuple(memory_reports[rank] for rank in sorted(memory_reports)),
        failures=tuple(failures),
        prints_balance=_BALANCE.search(text) is not None,
        timers=median_timers(timer_blocks, _warm_up_iterations(len(timer_blocks))),
        timer_blocks=timer_blocks,
        sizes=neox_sizes or sizes,
    )


def _read_mlperf(text: str) -> tuple[dict[str, int], tuple[Iteration, ...]]:
    """Return the sizes and the steps that records of MLPerf state."""
    if MLPERF_MARK.decode() not in text:
        return {}, ()
    content = text.encode()
    sizes = read_mlperf_sizes(content)
    steps = tuple(
        replace(
            _parse_iteration(step.number, ""),
            step_s=step.step_s,
            loss=step.loss,
            global_batch=sizes["global_batch_size"],
        )
        for step in read_mlperf_steps(content)
    )
    return sizes, steps


def _count_model_flops(
    iterations: Sequence[Iteration], arguments: Mapping[str, str]
) -> list[Iteration]:
    """Return iterations of GPT-NeoX, whose rate counts what is computed anew where it is."""
    is_recomputed = arguments.get("checkpoint_activations", "").startswith("True")
    share = _NEOX_RECOMPUTED if is_recomputed else 1.0
    return [
        replace(iteration, tflops_per_device=iteration.tflops_per_device * share)
        for iteration in iterations
    ]


def find_latest(numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of the steps that count, where a start may go back to a step.

    It forgets the steps from there on: of a step that is printed twice the last line counts, and of
    a run that began anew none. The numbers at these places rise.
    """
    printed = np.asarray(numbers, dtype=np.int64)
    behind = np.full(len(printed), np.iinfo(np.int64).max)  # the least number behind each
    behind[:-1] = np.minimum.accumulate(printed[:0:-1])[::-1]
    return np.flatnonzero(printed < behind)


def _parse_step_time(number: int, match: re.Match[str]) -> Iteration | None:
    """Return what Bridge's line says of an iteration; None where its seconds are no number."""
    try:
        step_s, rate = float(match[1]), float(match[2] or 0.0)
    except ValueError:
        return None
    nothing = _parse_iteration(number, "")
    return replace(nothing, step_s=step_s, tflops_per_device=rate)


def _with_step_time(iteration: Iteration, announced: Iteration | None) -> Iteration:
    """Return an iteration with what the line before it says and its own does not."""
    if announced is None:
        return iteration
    return replace(
        iteration,
        step_s=iteration.step_s or announced.step_s,
        tflops_per_device=iteration.tflops_per_device or announced.tflops_per_device,
    )


def _with_samples(iteration: Iteration, line: str) -> Iteration:
    """Return an iteration with the batch that a rate of samples before it makes."""
    match = _NEOX_SAMPLES.search(line)
    if match is None or iteration.global_batch:
        return iteration
    batch = float(match[1]) * iteration.step_s
    # Both are rounded: to a thousandth of a sample a second, and a tenth of a millisecond.
    slack = 1e-3 * iteration.step_s + 1e-4 * float(match[1])
    is_whole = abs(batch - round(batch)) <= slack < 1 / 2
    return replace(iteration, global_batch=round(batch)) if is_whole else iteration


def _parse_iteration(number: int, text: str) -> Iteration:
    values: dict[str, float] = {}
    rate = 0.0
    for part in text.split("|"):
        if match := _VALUE.match(part):
            values[match[1].strip().replace("_", " ")] = float(match[2].replace(",", ""))
        elif match := _RATE_ALONE.search(part) or _NEOX_RATE.search(part):
            rate = float(match[1])
    seconds = _first_value(values, _ELAPSED_SECONDS, default=0.0)
    return Iteration(
        number=number,
        step_s=_positive(_first_value(values, _ELAPSED, default=seconds * 1e3)) / 1e3,
        tflops_per_device=_positive(_first_value(values, _RATES, default=rate)),
        global_batch=next(filter(None, (_count(values, key) for key in _BATCH_KEYS)), 0),
        loss=_first_value(values, _LOSS_KEYS, default=float("nan")),
        grad_norm=values.get("grad norm", float("nan")),
        skipped=_count(values, "number of skipped iterations"),
        nan_losses=_count(values, "number of nan iterations"),
    )


def _positive(value: float) -> float:
    """Return a time or a rate; 0, which says nothing, for one that is not finite."""
    return value if isfinite(value) and value > 0 else 0.0


def _count(values: Mapping[str, float], key: str) -> int:
    return int(_positive(values.get(key, 0.0)))


def _first_value(values: Mapping[str, float], keys: Sequence[str], *, default: float) -> float:
    return next((values[key] for key in keys if key in values), default)


def _parse_memory_report(rank: int, unit: str, text: str) -> MemoryReport:
    """Parse a report of memory.

    Megatron-LM's "MB" are 2**20 bytes; Megatron-Bridge's "GB" are 1e9, and its keys are
    mem-allocated-gigabytes.
    """
    scale = MIB if unit == "MB" else GB
    nbytes = {
        key.replace("-", " "): round(float(value) * scale)
        for key, value in _MEMORY_VALUE.findall(text)
    }
    return MemoryReport(
        rank=rank,
        allocated_bytes=nbytes.get("allocated", 0),
        max_allocated_bytes=nbytes.get("max allocated", 0),
        reserved_bytes=nbytes.get("reserved", 0),
        max_reserved_bytes=nbytes.get("max reserved", 0),
    )


def _parse_failure(number: int, line: str) -> OutOfMemory:
    requested = _REQUESTED.search(line)
    capacity = _CAPACITY.search(line)
    requested_bytes = 0
    if requested:
        requested_bytes = round(float(requested[1]) * _SCALES[requested[2]])
    capacity_bytes = 0
    if capacity:
        capacity_bytes = round(float(capacity[1] or capacity[2]) * GIB)
    return OutOfMemory(line=number, requested_bytes=requested_bytes, capacity_bytes=capacity_bytes)


def printed_flops_per_token(log: MegatronLog, *, seq_len: int, devices: int) -> float:
    """Return what the trainer takes a token to cost, from its own rate; 0: it did not print one."""
    batches = (iteration.global_batch for iteration in log.steady_iterations)
    global_batch = next((batch for batch in batches if batch), 0)
    tokens_per_s = divide(global_batch * seq_len, log.step_s)
    return divide(log.tflops_per_device * TERA * devices, tokens_per_s)
