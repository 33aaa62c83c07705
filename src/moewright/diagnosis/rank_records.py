"""Records of ranks that the step recorder writes: slow devices, starved ranks, hot experts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from moewright.codec.files import as_table

RECORDS = "rank*.jsonl"
_WINDOW_BYTES = 1 << 20  # at the end of each file
_LATEST = 100  # steps
_SLOW_DEVICE = 0.05  # of the median's time
_LATE = 0.02  # of a step, beyond the other ranks
_HOT = 1.5  # rows of the hottest expert rank over the mean
_LEAST_PROBES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What a rank's latest records say, medians of seconds; `probe_s` is 0 where none was made."""

    rank: int
    steps: int
    step_s: float
    data_s: float
    gc_s: float
    probe_s: float
    peak_bytes: int
    expert_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


def read_rank_records(folder: Path) -> tuple[RankRecord, ...]:
    """Return what each rank has recorded last, by rank; a damaged line is left out."""
    records = (_summarize(path) for path in sorted(folder.glob(RECORDS)))
    return tuple(sorted((item for item in records if item is not None), key=lambda item: item.rank))


def _summarize(path: Path) -> RankRecord | None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _WINDOW_BYTES))
        lines = file.read().splitlines()
    rows = [row for row in map(_parse, lines) if row is not None][-_LATEST:]
    if not rows:
        return None
    tokens: dict[str, list[int]] = {}
    for row in rows:
        for name, counts in _list_counts(row):
            before = tokens.get(name, [0] * len(counts))
            if len(before) == len(counts):
                tokens[name] = [a + b for a, b in zip(before, counts, strict=True)]
    probes = [value for value in (_number(row, "probe_s") for row in rows) if value > 0]
    return RankRecord(
        rank=int(_number(rows[-1], "rank")),
        steps=len(rows),
        step_s=median(_number(row, "step_s") for row in rows),
        data_s=sum(_number(row, "data_s") for row in rows) / len(rows),
        gc_s=sum(_number(row, "gc_s") for row in rows) / len(rows),
        probe_s=median(probes) if len(probes) >= _LEAST_PROBES else 0.0,
        peak_bytes=int(max(_number(row, "peak_bytes") for row in rows)),
        expert_tokens=tokens,
    )


def _parse(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "recorded_step" in row else None


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name, 0.0)
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    return 0.0


def _list_counts(row: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    for name, counts in as_table(row.get("expert_tokens")).items():
        if isinstance(counts, list) and all(isinstance(count, int) for count in counts):
            yield str(name), counts


def find_stragglers(records: Sequence[RankRecord]) -> Iterator[tuple[int, str]]:
    """Yield the ranks that hold others up, with a sentence that says why."""
    probes = [record.probe_s for record in records if record.probe_s]
    if len(probes) > 2:
        typical_s = median(probes)
        for record in records:
            share = record.probe_s / typical_s - 1
            if share > _SLOW_DEVICE:
                yield (
                    record.rank,
                    f"the device of rank {record.rank} takes {share:.0%} longer for the same "
                    "product",
                )
    if len(records) < 2:
        return
    for name, cause in (("data_s", "data"), ("gc_s", "garbage collection")):
        typical_s = median(getattr(record, name) for record in records)
        for record in records:
            extra_s = getattr(record, name) - typical_s
            if record.step_s and extra_s > _LATE * record.step_s:
                yield (
                    record.rank,
                    f"rank {record.rank} waits for {cause} {extra_s / record.step_s:.0%} of a step "
                    "longer than the others",
                )


def measure_imbalance(records: Sequence[RankRecord], ep: int) -> float:
    """Return the rows of the hottest expert rank over the mean, of the worst layer; 0: not known.

    Experts lie in blocks of equal size on `ep` ranks.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for name, counts in record.expert_tokens.items():
            before = layers.get(name, [0] * len(counts))
            if len(before) == len(counts):
                layers[name] = [a + b for a, b in zip(before, counts, strict=True)]
    worst = 0.0
    for counts in layers.values():
        if not sum(counts) or ep < 1 or len(counts) % ep:
            continue
        size = len(counts) // ep
        loads = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
        worst = max(worst, max(loads) * ep / sum(loads))
    return worst


def is_hot(imbalance: float) -> bool:
    """Whether the hottest expert rank has so many rows that it holds the others up."""
    return imbalance > _HOT
