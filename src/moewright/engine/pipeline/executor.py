"""Runs one rank's rows of the timetable; it knows no schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moewright.rules.schedule import Kind, Row


def execute(
    rows: Sequence[Row], *, forward: Callable[[int], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> None:
    """Run F and B rows in order: `forward(micro_batch)` gives the scalar that `backward` later starts from.

    Each loss is let go of with its backward, so activations live exactly as long as the timetable says.
    """
    live: dict[tuple[int, int], torch.Tensor] = {}
    for row in rows:
        key = (row.micro_batch, row.chunk)
        if row.kind is Kind.F:
            live[key] = forward(row.micro_batch)
        elif row.kind is Kind.B:
            backward(live.pop(key))
