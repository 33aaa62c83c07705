"""How a run is shown while it goes on, by the process that starts its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moewright.spec.plan import Plan


class RunDisplay(Protocol):
    """A display of a run, which draws from the records of its folder.

    `begin` is called each time that ranks are about to start, `refresh` several times a second
    while they run, `end` when they have ended. None of them raises anything or waits for long:
    a display must not end a run. `prints_steps`: rank 0 prints a line a step.
    """

    @property
    def prints_steps(self) -> bool: ...

    def begin(self, plan: Plan, run_dir: Path, last_step: int) -> None: ...

    def refresh(self) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLines:
    """The display of lines alone, which rank 0 prints, or of nothing at all."""

    prints_steps: bool = True

    def begin(self, plan: Plan, run_dir: Path, last_step: int) -> None:
        pass

    def refresh(self) -> None:
        pass

    def end(self) -> None:
        pass


STEP_LINES = StepLines()
