"""Flat buffers: where each parameter lies in a bucket, and the slice that a rank owns.

See docs/formulas.md 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

from moewright.spec.errors import BadInput, Reason

# A bucket is a multiple of 128 elements, as Megatron-LM pads it; a shard of it may be of fewer.
_PAD_ELEMENTS = 128
_ALIGN_ELEMENTS = 64  # where parameters start inside a bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketEntry:
    """One parameter in a bucket: elements [start, start + numel) of it."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters that are reduced together.

    `numel` includes the padding; it is a multiple of lcm(shards, 128).
    """

    entries: tuple[BucketEntry, ...]
    numel: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_numel(end: Any, shards: int, shard_multiple: int = 1) -> Any:
    """Return the elements of a bucket that ends at `end`, padded so that it splits into shards.

    A shard is of a multiple of `shard_multiple` elements. `end` may be an array.
    """
    multiple = lcm(shards * shard_multiple, _PAD_ELEMENTS)
    return -(-end // multiple) * multiple


def lay_parameter(
    end: int, numel: int, *, bucket_elements: int, align: int = _ALIGN_ELEMENTS
) -> tuple[int, int, bool]:
    """Place a parameter after the `end` of a bucket; return start, end, and if the bucket closes.

    Start and end are the parameter's, in elements of the bucket. The bucket closes when it holds
    `bucket_elements` or more, alignment gaps included.
    """
    start = _round_up(end, align)
    return start, start + numel, start + numel >= bucket_elements


def plan_buckets(
    params: Sequence[tuple[str, int]],
    *,
    shards: int,
    bucket_elements: int,
    align: int = _ALIGN_ELEMENTS,
    shard_multiple: int = 1,
) -> tuple[Bucket, ...]:
    """Lay (name, numel) pairs out in order, each start a multiple of `align` elements.

    A bucket closes when it holds `bucket_elements` or more, alignment gaps included; this is
    checked after each parameter. Its end is padded (padded_numel).

    Raises:
        BadInput: A count is below 1.
    """
    for field, value in (
        ("shards", shards),
        ("bucket_elements", bucket_elements),
        ("align", align),
    ):
        if value < 1:
            rule = "must be at least 1"
            raise BadInput(Reason(field=field, value=str(value), rule=rule, nearest="1"))
    buckets: list[Bucket] = []
    entries: list[BucketEntry] = []
    end = 0
    for name, numel in params:
        if numel < 1:
            rule = "a parameter has at least one element"
            raise BadInput(Reason(field=name, value=str(numel), rule=rule))
        start, end, closes = lay_parameter(end, numel, bucket_elements=bucket_elements, align=align)
        entries.append(BucketEntry(name=name, start=start, numel=numel))
        if closes:
            buckets.append(
                Bucket(entries=tuple(entries), numel=padded_numel(end, shards, shard_multiple))
            )
            entries = []
            end = 0
    if entries:
        buckets.append(
            Bucket(entries=tuple(entries), numel=padded_numel(end, shards, shard_multiple))
        )
    return tuple(buckets)


def shard_range(bucket: Bucket, shards: int, index: int) -> tuple[int, int]:
    """Return the elements [start, stop) of the bucket that shard `index` owns, in equal slices."""
    size, remainder = divmod(bucket.numel, shards)
    if remainder or not 0 <= index < shards:
        raise ValueError(f"shard {index} of {shards} of a bucket of {bucket.numel} elements")
    return index * size, (index + 1) * size


def offloaded_numel(own: Any, fraction: float) -> Any:
    """Return how many of a rank's `own` elements of optimizer state are offloaded: its first.

    They end where blocks of 64 elements do, so that a vector unit updates the same elements
    together whatever the fraction is. `own` may be an array.
    """
    return np.minimum(own, np.ceil(fraction * own / _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS)
