"""Axis: one thing that tuning may change, and the values that it may take."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of [train] that change how a step is run and nothing of what it trains.
TUNABLE_TRAIN_KEYS = ("bucket_elements", "gc_every_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningAxis:
    """`key` is one of a layout's text or of TRAIN_KEYS; values are written as there, the order has
    no meaning."""

    key: str
    values: tuple[str, ...]
