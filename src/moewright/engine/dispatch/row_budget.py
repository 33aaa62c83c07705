"""Rows over the budget of a rank (`layout.rank_capacity`), noted on the device as a step goes on.

Nothing is read by the host until the step's gradients are reduced: if some rank had more rows for
another than the budget, the step is run again with as many rows as there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RowBudget:
    """The state of the budget: whether it is enforced, and how many rows were over it.

    It is enforced only inside `enforce`; elsewhere, as in an evaluation, all rows are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_enforced = False
        self._excess = torch.zeros((), dtype=torch.float64, device=device)

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Pad rows to the budget inside, and count those over it from zero."""
        self._excess.zero_()
        self.is_enforced = True
        try:
            yield
        finally:
            self.is_enforced = False

    def note(self, rows: torch.Tensor) -> None:
        """Add rows that were over the budget, a number on the device."""
        self._excess += rows

    def flag(self) -> torch.Tensor:
        """Return 2 if a row was over the enforced budget, else 0: fp64 on the device.

        It is added up over ranks. A dry run reads 1 for every number, which no sum of these is.
        """
        return 2.0 * (self._excess > 0) * self.is_enforced
