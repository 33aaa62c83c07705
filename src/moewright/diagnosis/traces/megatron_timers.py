"""Timers that Megatron prints after an iteration with --timing-log-level 1 or 2, in each of its
spellings.

The device is synchronised where a timer starts and stops, so what one says was waited for by nobody
else meanwhile. Those of gradients lie inside `forward-backward`, loading inside `forward-compute`,
gathered weights inside `optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moewright.spec.finding import Cause, Finding, Wall
from moewright.spec.plan import TimePart
from moewright.spec.units import format_seconds

FORWARD_BACKWARD, OPTIMIZER = "forward-backward", "optimizer"
FORWARD_COMPUTE, BACKWARD_COMPUTE, BATCH_GENERATOR = (
    "forward-compute",
    "backward-compute",
    "batch-generator",
)
_GATHERED = "params-all-gather"
_GRADIENTS = ("all-grads-sync", "backward-params-all-reduce")
_NORMS = ("layernorm-grads-all-reduce", "non-tensor-parallel-grads-all-reduce")
_ENDS = (
    "embedding-grads-all-reduce",
    "backward-embedding-all-reduce",
    "conditional-embedder-grads-all-reduce",
)
_INSIDE = (*_GRADIENTS, *_NORMS, *_ENDS)  # of forward-backward
_SUMS = (
    (Cause.DP, (*_GRADIENTS, _GATHERED), "Gradients and weights of data ranks take"),
    (Cause.TP, _NORMS, "Gradients of tensor ranks take"),
    (Cause.PP, _ENDS, "Gradients shared by the first and last stage take"),
)
_SAID, _LATE = 0.01, 0.03  # of the step: less is left to the table
_MESSAGE = re.compile(r"(forward|backward)(-backward)?-(send|recv)")
_HEAD = re.compile(r"\btimes? across ranks \(ms\):")
_LINE = re.compile(r"([a-z][a-z0-9/-]+) \.{2,}: (?:\(([\d.]+), ([\d.]+)\)|([\d.]+))\s*$")
_NAME = re.compile(r"^\s+([a-z][a-z0-9/-]+):\s*$")
_RANK = re.compile(r"\brank +(\d+): ([\d.]+)\s*$")
_ONE_LINE = re.compile(r"\btime \(ms\) \|(.*)")
_PAIR = re.compile(r"([a-z][a-z0-9-]+): ([\d.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """Seconds an iteration: of the rank that took least, and most, of those that ran it."""

    min_s: float
    max_s: float


def read_timers(lines: Iterable[str], warm: int) -> Mapping[str, Timer]:
    """By name, the median over the iterations that were timed, without the first `warm` where more
    follow."""
    training = [
        block for block in _blocks(lines) if FORWARD_BACKWARD in block or FORWARD_COMPUTE in block
    ]
    training = training[warm:] or training
    names = dict.fromkeys(name for block in training for name in block)
    return {name: _typical([block[name] for block in training if name in block]) for name in names}


def _typical(timers: Sequence[Timer]) -> Timer:
    return Timer(
        min_s=median(each.min_s for each in timers),
        max_s=median(each.max_s for each in timers),
    )


def _blocks(lines: Iterable[str]) -> Iterator[dict[str, Timer]]:
    """Each printing of timers; any other line ends it."""
    block: dict[str, Timer] = {}
    inside, name = False, ""
    for line in lines:
        if _HEAD.search(line) or not inside:
            if block:
                yield block
            block, inside = {}, bool(_HEAD.search(line))
            if found := _ONE_LINE.search(line):
                yield {each[1]: _timer(each[2], each[2]) for each in _PAIR.finditer(found[1])}
        elif found := _LINE.search(line):
            block[found[1]] = _timer(found[2] or found[4], found[3] or found[4])
        elif found := _NAME.search(line):
            name = found[1]
        elif name and (found := _RANK.search(line)):
            now, have = _timer(found[2], found[2]), block.get(name)
            block[name] = now if have is None else _spread(have, now)
        else:
            inside, name = False, ""
    if block:
        yield block


def _timer(least_ms: str, most_ms: str) -> Timer:
    return Timer(min_s=float(least_ms) / 1e3, max_s=float(most_ms) / 1e3)


def _spread(a: Timer, b: Timer) -> Timer:
    return Timer(min_s=min(a.min_s, b.min_s), max_s=max(a.max_s, b.max_s))


def diagnose_timers(timers: Mapping[str, Timer], step_s: float) -> Iterator[Finding]:
    """What the timers of a run say of its step, without fixes; nothing where it printed none, or no
    iteration.

    The rank that waits least for a sum came last: what it takes is the exchange, what others take
    above it is waiting for that rank.
    """
    if not (timers and step_s):
        return

    def found(
        wall: Wall, cause: Cause, seconds: float, what: str, *names: str
    ) -> Iterator[Finding]:
        if seconds > _SAID * step_s:
            said = tuple(_said(name, timers[name]) for name in names if name in timers)
            title = f"{what} {seconds / step_s:.0%} of the step"
            yield Finding(
                wall=wall, cause=cause, title=title, share=seconds / step_s, evidence=said, fixes=()
            )

    for cause, names, what in _SUMS:
        exchange = _least(timers, *names)
        yield from found(Wall.COMMUNICATION, cause, exchange, what, *names)
        late = _most(timers, *names) - exchange
        if late > _LATE * step_s:
            yield from found(
                Wall.COMMUNICATION, Cause.STRAGGLER, late, f"{what}: a late rank costs", *names
            )
    yield from found(
        Wall.HOST,
        Cause.DATA,
        _most(timers, BATCH_GENERATOR),
        "Batches are waited for",
        BATCH_GENERATOR,
    )
    computed, messages, between = (
        _most(timers, FORWARD_COMPUTE, BACKWARD_COMPUTE),
        _messages(timers),
        _between_s(timers),
    )
    if messages and between is None:
        waited = _most(timers, *messages)
        yield from found(
            Wall.COMMUNICATION, Cause.PP, waited, "The pipeline is waited for", *messages
        )
    elif messages:
        what = "The ranks that compute most wait for the pipeline"
        yield from found(
            Wall.COMMUNICATION,
            Cause.PP,
            between or 0.0,
            what,
            FORWARD_BACKWARD,
            FORWARD_COMPUTE,
            BACKWARD_COMPUTE,
            *messages,
        )
    else:
        yield from found(
            Wall.HOST,
            Cause.HOST_OTHER,
            between or 0.0,
            "Between micro-batches pass",
            FORWARD_BACKWARD,
            FORWARD_COMPUTE,
        )
    if FORWARD_BACKWARD in timers and OPTIMIZER in timers:
        outside = step_s - _most(timers, FORWARD_BACKWARD, OPTIMIZER)
        yield from found(
            Wall.HOST,
            Cause.HOST_OTHER,
            outside,
            "Outside of training steps pass",
            FORWARD_BACKWARD,
            OPTIMIZER,
        )
    if computed:
        work = computed - _most(timers, BATCH_GENERATOR) + _updated_s(timers)
        yield from found(
            Wall.COMPUTE,
            Cause.KERNEL_RATES,
            work,
            "Compute takes",
            FORWARD_COMPUTE,
            BACKWARD_COMPUTE,
            OPTIMIZER,
        )


def measure_parts(timers: Mapping[str, Timer]) -> Mapping[TimePart, float]:
    """Seconds of the planner's parts of a step that timers measured; a pipeline's messages count
    with its bubble."""
    parts: dict[TimePart, float] = {}
    summed = (*_GRADIENTS, _GATHERED)
    if any(name in timers for name in summed):
        parts[TimePart.DP_COMM] = _least(timers, *summed)
    if OPTIMIZER in timers:
        parts[TimePart.OPTIMIZER] = _updated_s(timers)
    between = _between_s(timers)
    if _messages(timers) and between is not None:
        parts |= {TimePart.BUBBLE: between, TimePart.PP_COMM: 0.0}
    return parts


def _least(timers: Mapping[str, Timer], *names: str) -> float:
    return sum(timers[name].min_s for name in names if name in timers)


def _most(timers: Mapping[str, Timer], *names: str) -> float:
    return sum(timers[name].max_s for name in names if name in timers)


def _updated_s(timers: Mapping[str, Timer]) -> float:
    return _most(timers, OPTIMIZER) - _most(timers, _GATHERED)


def _messages(timers: Mapping[str, Timer]) -> tuple[str, ...]:
    return tuple(name for name in timers if _MESSAGE.match(name))


def _between_s(timers: Mapping[str, Timer]) -> float | None:
    """Of forward and backward, what is neither computed, by the ranks that compute most, nor the
    sum of a gradient.

    None where that was not timed.
    """
    if not all(name in timers for name in (FORWARD_BACKWARD, FORWARD_COMPUTE, BACKWARD_COMPUTE)):
        return None
    return _most(timers, FORWARD_BACKWARD) - _most(
        timers, FORWARD_COMPUTE, BACKWARD_COMPUTE, *_INSIDE
    )


def _said(name: str, timer: Timer) -> str:
    ends = format_seconds(timer.max_s)
    if timer.min_s < 0.995 * timer.max_s:
        ends = f"{format_seconds(timer.min_s)} to {ends} over the ranks"
    return f"{name} {ends} (measured)"
