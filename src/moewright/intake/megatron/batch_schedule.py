"""The batch sizes of Megatron-LM's --step-batch-size-schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moewright.intake.megatron.arguments import Arguments
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import BatchRampSpec

SCHEDULE = "--step-batch-size-schedule"
_ENTRY = re.compile(r"([0-9.]+)([KMBT]?):([0-9.]+)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """The full global batch of a schedule, and how batches grow to it."""

    global_batch: int
    ramp: BatchRampSpec


def read_batch_schedule(arguments: Arguments, seq_len: int) -> BatchSchedule:
    """Read "0:512 1B:1024 2B:1536": tokens before, and the batch from there on.

    Raises:
        BadInput: an entry cannot be read, or batches do not grow in equal steps.
    """
    text = arguments.text(SCHEDULE)
    sizes = sorted(_read_entry(entry, seq_len) for entry in text.replace(",", " ").split())
    if not sizes or sizes[0][0] != 0:
        raise BadInput(Reason(field=SCHEDULE, value=text[:60], rule="begins with a batch at 0"))
    start = sizes[0][1]
    full = sizes[-1][1]
    if len(sizes) == 1:
        return BatchSchedule(global_batch=full, ramp=BatchRampSpec())
    increment = sizes[1][1] - start
    count = len(sizes) - 1
    samples = sizes[-1][0]
    is_ramp = increment > 0 and all(
        size == start + stage * increment and first == -(-stage * samples // count)
        for stage, (first, size) in enumerate(sizes)
    )
    if not is_ramp:
        rule = "is planned here where batches grow in equal steps after equally many tokens"
        raise BadInput(Reason(field=SCHEDULE, value=text[:60], rule=rule))
    ramp = BatchRampSpec(ramp_start=start, ramp_increment=increment, ramp_samples=samples)
    return BatchSchedule(global_batch=full, ramp=ramp)


def _read_entry(entry: str, seq_len: int) -> tuple[int, int]:
    """Return (sequences before, batch size) of an entry."""
    match = _ENTRY.fullmatch(entry)
    if not match:
        rule = "has entries of tokens and a batch size, such as 250B:1536"
        raise BadInput(Reason(field=SCHEDULE, value=entry[:60], rule=rule))
    tokens, unit, size, size_unit = match.groups()
    first = int(float(tokens) * _UNITS[unit.upper()]) // seq_len
    return first, int(float(size) * _UNITS[size_unit.upper()])
