"""One thing that tuning may change, and the values that it may take."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of [train] that change how a step runs and nothing about what it trains.
TUNABLE_TRAIN_KEYS = ("bucket_elements", "gc_every_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningAxis:
    """A key that tuning may change, with its candidate values in no particular order.

    `key` is a key of the layout text or one of TUNABLE_TRAIN_KEYS; values are written as they are
    in the layout text or the job file.
    """

    key: str
    values: tuple[str, ...]
