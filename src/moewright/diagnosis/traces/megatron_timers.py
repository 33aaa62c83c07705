"""Timers that Megatron prints after an iteration with --timing-log-level 1 or 2, in every spelling.

The device is synchronised where a timer starts and stops, so the timers do not overlap unless they
are nested: the timers of gradients lie inside `forward-backward`, data loading inside
`forward-compute`, and the gather of weights inside `optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart
from moewright.spec.units import format_seconds

FORWARD_BACKWARD = "forward-backward"
FORWARD_COMPUTE = "forward-compute"
BACKWARD_COMPUTE = "backward-compute"
BATCH_GENERATOR = "batch-generator"
OPTIMIZER = "optimizer"
_PARAM_GATHER = "params-all-gather"
_GRADIENTS = ("all-grads-sync", "backward-params-all-reduce")
_NORMS = ("layernorm-grads-all-reduce", "non-tensor-parallel-grads-all-reduce")
_EMBEDDINGS = (
    "embedding-grads-all-reduce",
    "backward-embedding-all-reduce",
    "conditional-embedder-grads-all-reduce",
)
_INSIDE_FORWARD_BACKWARD = (*_GRADIENTS, *_NORMS, *_EMBEDDINGS)
_REDUCING = (*_GRADIENTS, *_NORMS, *_EMBEDDINGS)
_REDUCTIONS = (
    (Cause.DP, (*_GRADIENTS, _PARAM_GATHER), "Gradients and weights of data ranks take"),
    (Cause.TP, _NORMS, "Gradients of tensor ranks take"),
    (Cause.PP, _EMBEDDINGS, "Gradients shared by the first and last stage take"),
)
# Shares of the step: less is not reported.
_MIN_SHARE = 0.01
_MIN_LATE_SHARE = 0.03
_SPREAD_RATIO = 0.995  # ranks nearer to each other than this print one figure
# Milliseconds, and nothing that only begins like a number.
_MS = r"\d+(?:\.\d*)?"
_MESSAGE = re.compile(r"(forward|backward)(-backward)?-(send|recv)")
_HEADER = re.compile(r"\btimes? across ranks \(ms\):")
_MIN_MAX = re.compile(rf"([a-z][a-z0-9/-]+) \.{{2,}}: (?:\(({_MS}), ({_MS})\)|({_MS}))\s*$")
_NAME = re.compile(r"^\s+([a-z][a-z0-9/-]+):\s*$")
_RANK = re.compile(rf"\brank +(\d+): ({_MS})\s*$")
_LONGEST_LINE = 1 << 17
_MARKS = ("across ranks (ms):", "time (ms) |")  # of _HEADER and _ONE_LINE
_ONE_LINE = re.compile(r"\btime \(ms\) \|(.*)")
_NAME_AND_TIME = re.compile(rf"([a-z][a-z0-9-]+): ({_MS})(?![\w.])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """Seconds an iteration of the fastest and the slowest rank among those that ran the timer."""

    min_s: float
    max_s: float


TimerBlock = Mapping[str, Timer]


def read_timer_blocks(lines: Iterable[str]) -> tuple[TimerBlock, ...]:
    """Read the timers by name as they were printed after iterations, in order."""
    return tuple(
        block
        for block in _read_blocks(lines)
        if FORWARD_BACKWARD in block or FORWARD_COMPUTE in block
    )


def read_timers(text: str) -> tuple[TimerBlock, ...]:
    """Read the timers of a part of a log; one in which none were printed is not taken apart."""
    if not any(mark in text for mark in _MARKS):
        return ()
    return read_timer_blocks(split_lines(text))


def split_lines(text: str) -> list[str]:
    """Return the lines of a log, each as far as one goes.

    A file of one endless line is no log, and would be searched for minutes.
    """
    return [line[:_LONGEST_LINE] for line in re.split(r"[\r\n]+", text)]


def sum_timers(block: TimerBlock) -> float:
    """Return the seconds of an iteration by its timers that do not lie inside each other."""
    if FORWARD_BACKWARD in block:
        return _sum_max(block, FORWARD_BACKWARD, OPTIMIZER)
    messages = _message_timers(block)
    return _sum_max(block, FORWARD_COMPUTE, BACKWARD_COMPUTE, *_REDUCING, OPTIMIZER, *messages)


def median_timers(blocks: Sequence[TimerBlock], warm_up: int) -> Mapping[str, Timer]:
    """Return each timer's median over the iterations that were timed.

    The first `warm_up` iterations are left out where more follow.
    """
    steady = blocks[warm_up:] or blocks
    names = dict.fromkeys(name for block in steady for name in block)
    return {
        name: _median_timer([block[name] for block in steady if name in block]) for name in names
    }


def _median_timer(timers: Sequence[Timer]) -> Timer:
    return Timer(
        min_s=median(timer.min_s for timer in timers), max_s=median(timer.max_s for timer in timers)
    )


def _read_blocks(lines: Iterable[str]) -> Iterator[dict[str, Timer]]:
    """Yield each printing of timers; any other line ends it."""
    block: dict[str, Timer] = {}
    in_block = False
    name = ""
    for line in lines:
        is_header = bool(_HEADER.search(line))
        if is_header or not in_block:
            if block:
                yield block
            block = {}
            in_block = is_header
            if one_line := _ONE_LINE.search(line):
                yield {
                    match[1]: _parse_timer(match[2], match[2])
                    for match in _NAME_AND_TIME.finditer(one_line[1])
                }
        elif match := _MIN_MAX.search(line):
            block[match[1]] = _parse_timer(match[2] or match[4], match[3] or match[4])
        elif match := _NAME.search(line):
            name = match[1]
        elif name and (match := _RANK.search(line)):
            timer = _parse_timer(match[2], match[2])
            block[name] = _widen(block.get(name, timer), timer)
        else:
            in_block = False
            name = ""
    if block:
        yield block


def _parse_timer(min_ms: str, max_ms: str) -> Timer:
    return Timer(min_s=float(min_ms) / 1e3, max_s=float(max_ms) / 1e3)


def _widen(a: Timer, b: Timer) -> Timer:
    return Timer(min_s=min(a.min_s, b.min_s), max_s=max(a.max_s, b.max_s))


def diagnose_timers(timers: Mapping[str, Timer], step_s: float) -> Iterator[Finding]:
    """Yield the findings of a run's timers, without fixes.

    There are none where the run printed no timers, or no iteration. Where the timers add up to more
    than the step, as around steps that were skipped, shares are of their sum.
    """
    if timers and step_s:
        step = _TimedStep(timers=timers, step_s=max(step_s, sum_timers(timers)))
        yield from step.diagnose_reductions()
        yield from step.diagnose_loading()
        yield from step.diagnose_gaps()
        yield from step.diagnose_outside()
        yield from step.diagnose_compute()


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedStep:
    """A step with its timers."""

    timers: Mapping[str, Timer]
    step_s: float

    def diagnose_reductions(self) -> Iterator[Finding]:
        """Report the reductions of gradients.

        The rank with the shortest timer came last, so its time is that of the exchange alone. What
        the other ranks take beyond it is waiting for that rank.
        """
        comm = Wall.COMMUNICATION
        for cause, names, subject in _REDUCTIONS:
            exchange_s = _sum_min(self.timers, *names)
            yield from self._report(comm, cause, exchange_s, subject, *names)
            late_s = _sum_max(self.timers, *names) - exchange_s
            if late_s > _MIN_LATE_SHARE * self.step_s:
                late_subject = f"{subject}: a late rank costs"
                yield from self._report(comm, Cause.STRAGGLER, late_s, late_subject, *names)

    def diagnose_loading(self) -> Iterator[Finding]:
        loading_s = _sum_max(self.timers, BATCH_GENERATOR)
        subject = "Batches are waited for"
        yield from self._report(Wall.HOST, Cause.DATA, loading_s, subject, BATCH_GENERATOR)

    def diagnose_gaps(self) -> Iterator[Finding]:
        """Report what forward and backward spend besides computing: on messages, or on the host."""
        messages = _message_timers(self.timers)
        gaps_s = _gaps_s(self.timers)
        comm = Wall.COMMUNICATION
        if messages and gaps_s is None:
            waited_s = _sum_max(self.timers, *messages)
            subject = "The pipeline is waited for"
            yield from self._report(comm, Cause.PP, waited_s, subject, *messages)
        elif messages:
            subject = "The ranks that compute most wait for the pipeline"
            names = (FORWARD_BACKWARD, FORWARD_COMPUTE, BACKWARD_COMPUTE, *messages)
            yield from self._report(comm, Cause.PP, gaps_s or 0.0, subject, *names)
        else:
            subject = "Between micro-batches pass"
            names = (FORWARD_BACKWARD, FORWARD_COMPUTE)
            yield from self._report(Wall.HOST, Cause.HOST_OTHER, gaps_s or 0.0, subject, *names)

    def diagnose_outside(self) -> Iterator[Finding]:
        if FORWARD_BACKWARD in self.timers and OPTIMIZER in self.timers:
            names = (FORWARD_BACKWARD, OPTIMIZER)
            outside_s = self.step_s - _sum_max(self.timers, *names)
            subject = "Outside of training steps pass"
            yield from self._report(Wall.HOST, Cause.HOST_OTHER, outside_s, subject, *names)

    def diagnose_compute(self) -> Iterator[Finding]:
        computed_s = _sum_max(self.timers, FORWARD_COMPUTE, BACKWARD_COMPUTE)
        if computed_s:
            loading_s = _sum_max(self.timers, BATCH_GENERATOR)
            work_s = computed_s - loading_s + _update_s(self.timers)
            names = (FORWARD_COMPUTE, BACKWARD_COMPUTE, OPTIMIZER)
            yield from self._report(
                Wall.COMPUTE, Cause.KERNEL_RATES, work_s, "Compute takes", *names
            )

    def _report(
        self, wall: Wall, cause: Cause, seconds: float, subject: str, *names: str
    ) -> Iterator[Finding]:
        """Yield a finding where the seconds are much of the step, with the timers as evidence."""
        share = seconds / self.step_s
        if seconds > _MIN_SHARE * self.step_s:
            present = [name for name in names if name in self.timers]
            yield Finding(
                wall=wall,
                cause=cause,
                title=f"{subject} {share:.0%} of the step",
                share=share,
                evidence=tuple(_describe(name, self.timers[name]) for name in present),
                fixes=(),
            )


def measure_parts(timers: Mapping[str, Timer]) -> Mapping[TimePart, float]:
    """Return the seconds of the planner's parts of a step that timers measured.

    A pipeline's messages count with its bubble.
    """
    parts: dict[TimePart, float] = {}
    reductions = (*_GRADIENTS, _PARAM_GATHER)
    if any(name in timers for name in reductions):
        parts[TimePart.DP_COMM] = _sum_min(timers, *reductions)
    if OPTIMIZER in timers:
        parts[TimePart.OPTIMIZER] = _update_s(timers)
    gaps_s = _gaps_s(timers)
    if _message_timers(timers) and gaps_s is not None:
        parts[TimePart.BUBBLE] = gaps_s
        parts[TimePart.PP_COMM] = 0.0
    return parts


def _sum_min(timers: Mapping[str, Timer], *names: str) -> float:
    return sum(timers[name].min_s for name in names if name in timers)


def _sum_max(timers: Mapping[str, Timer], *names: str) -> float:
    return sum(timers[name].max_s for name in names if name in timers)


def _update_s(timers: Mapping[str, Timer]) -> float:
    """Return the seconds of the optimizer without the gather of weights."""
    return _sum_max(timers, OPTIMIZER) - _sum_max(timers, _PARAM_GATHER)


def _message_timers(timers: Mapping[str, Timer]) -> tuple[str, ...]:
    return tuple(name for name in timers if _MESSAGE.match(name))


def _gaps_s(timers: Mapping[str, Timer]) -> float | None:
    """Return the seconds of forward and backward that are neither compute nor a reduction.

    Compute is that of the ranks that compute most. Return None where it was not timed.
    """
    if not all(name in timers for name in (FORWARD_BACKWARD, FORWARD_COMPUTE, BACKWARD_COMPUTE)):
        return None
    inside = (FORWARD_COMPUTE, BACKWARD_COMPUTE, *_INSIDE_FORWARD_BACKWARD)
    return _sum_max(timers, FORWARD_BACKWARD) - _sum_max(timers, *inside)


def _describe(name: str, timer: Timer) -> str:
    seconds = format_seconds(timer.max_s)
    if timer.min_s < _SPREAD_RATIO * timer.max_s:
        seconds = f"{format_seconds(timer.min_s)} to {seconds} over the ranks"
    return f"{name} {seconds} (measured)"
