"""A run that looks after itself: its ranks are started again, on fewer devices if need be.

The rules, which docs/how_to/endure.md states for users:

- After a crash, a hang or a number that is not finite, the ranks start again from the newest whole
  checkpoint, at once and then after 1, 2, 4, ... seconds while no newer checkpoint comes.
- Where the job keeps copies of its state in other ranks' memory, another process takes the place of
  a rank that crashed or hangs, and the others stay (engine.run.peer_copies). All start again where
  that fails, or the next failure comes within ten steps: that is no second failure of the step.
- When the same step fails twice in a row, or two starts in a row fail before their first step, the
  supervisor gives up and says why; so it does when ten starts in a row have come to little.
- A rank that fails so twice in a row, not by its numbers, is gone for good where fewer ranks may
  go on: the job is planned for those that are left. They are stopped after a while, or at SIGUSR2,
  and all ranks are tried again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from moewright.codec import format_layout
from moewright.engine.checkpoint import checkpoint_path, latest_step
from moewright.engine.observe.display import STEP_LINES, RunDisplay
from moewright.engine.run.launch import LaunchHooks
from moewright.engine.run.run_records import note_end, note_return
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode, RankFailure
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.run import IncidentKind
from moewright.spec.units import HOUR_S

RETURN_SIGNAL = signal.SIGUSR2
# How long a run goes on with fewer ranks before all are tried again; doubled when that fails.
_RETURN_S = 1800.0
_MAX_RETURN_S = 8 * HOUR_S
_MAX_DELAY_S = 60.0
# A start has come to something when it made so many steps, and saved a newer checkpoint.
_ENDURED_STEPS = 10
_MAX_SHORT_STARTS = 10
_WORN_OUT = (
    f"gave up: {_MAX_SHORT_STARTS} starts in a row have failed within {_ENDURED_STEPS} steps, or "
    "before they saved a checkpoint"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elasticity:
    """The way to go on with fewer ranks.

    `replan` returns the plan of the job for so many ranks, or None where there is none;
    `min_ranks` are the fewest to go on with.
    """

    replan: Callable[[int], Plan | None]
    min_ranks: int


def supervise(
    plan: Plan,
    run_dir: Path,
    *,
    extend: bool = False,
    elasticity: Elasticity | None = None,
    display: RunDisplay = STEP_LINES,
) -> ExitCode:
    """Train as `train` does, and start the ranks again when they fail; return the last exit code.

    Main thread only.

    Raises:
        BadInput: as `train` does, at any start.
    """
    supervisor = _Supervisor(plan, run_dir, elasticity)
    with supervisor.listen():
        while True:
            failures: list[RankFailure] = []
            keeps_copies = supervisor.plan.workload.checkpoint.peer_every_steps > 0
            hooks = LaunchHooks(
                report_failure=failures.append,
                wants_stop=supervisor.wants_stop,
                display=display,
                keeps_ranks=supervisor.keeps_ranks if keeps_copies else None,
            )
            try:
                code = train(
                    supervisor.plan,
                    run_dir,
                    extend=extend,
                    falls_back=True,
                    hooks=hooks,
                    local_ranks=supervisor.slots,
                )
            except BadInput as error:
                note_end(run_dir, str(error))
                raise
            if failures:
                if not supervisor.prepare_restart(failures[-1]):
                    return code
            elif not (code is ExitCode.STOPPED and supervisor.takes_ranks_back()):
                return code


class _Supervisor:
    """What the supervisor knows of the job: the ranks that it has, and the last failures.

    A slot is the number of a rank when all ranks are there; ranks that are left keep their slots,
    which are their devices.
    """

    def __init__(self, plan: Plan, run_dir: Path, elasticity: Elasticity | None) -> None:
        self._full_plan = plan
        self._run_dir = run_dir
        self._elasticity = elasticity
        self.plan = plan
        self.slots = tuple(range(plan.layout.world_size))
        self._gone: frozenset[int] = frozenset()
        self._last: RankFailure | None = None
        self._last_slot = -1
        self._was_in_place = False  # the way on after the last failure
        self._saved_step = -1
        self._restarts = 0  # since there was a newer checkpoint
        self._start_step = latest_step(run_dir / "checkpoints")
        self._short_starts = 0  # in a row
        self._return_s = _RETURN_S
        self._shrunk_at_s = 0.0
        self._is_return_requested = False
        self._is_returning = False

    @property
    def _has_all_ranks(self) -> bool:
        return self.plan.layout.world_size == self._full_plan.layout.world_size

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Take the signal that the ranks that were gone are back."""

        def request_return(number: int, frame: FrameType | None) -> None:
            self._is_return_requested = True

        handler = signal.signal(RETURN_SIGNAL, request_return)
        try:
            yield
        finally:
            signal.signal(RETURN_SIGNAL, handler)

    def wants_stop(self, is_requested: bool) -> bool:
        """Tell whether the ranks should stop for those that were gone; a user's stop goes first."""
        if is_requested:
            self._is_returning = False
        elif not self._has_all_ranks and not self._is_returning:
            is_due = time.monotonic() - self._shrunk_at_s > self._return_s
            self._is_returning = is_due or self._is_return_requested
        return self._is_returning

    def takes_ranks_back(self) -> bool:
        """Return whether the ranks have stopped for those that were gone; then all are to start."""
        if not self._is_returning:
            return False
        note_return(self._run_dir, self.plan.layout)
        self._tell("stopped for the ranks that were gone: trying all again")
        self._is_returning = False
        self._is_return_requested = False
        self.plan = self._full_plan
        self.slots = tuple(range(self.plan.layout.world_size))
        return True

    def keeps_ranks(self, failure: RankFailure) -> bool:
        """Tell whether the other ranks stay and go on, with a new process as the one that failed.

        They do not where the state may be at fault, nor where the last failure is but a few steps
        back: then all start again, and the rules for that decide.
        """
        has_died = failure.cause in (IncidentKind.CRASH, IncidentKind.HANG) and not failure.reasons
        if not has_died or not failure.step:
            return False
        if self._last is not None and failure.step - self._last.step <= _ENDURED_STEPS:
            return False
        self._last = failure
        self._last_slot = self.slots[failure.rank]
        self._was_in_place = True
        self._tell(f"{failure}; another process takes its place, the other ranks stay")
        return True

    def prepare_restart(self, failure: RankFailure) -> bool:
        """Return whether the ranks are to start again, on `slots` by `plan`, after some time."""
        slot = self.slots[failure.rank]
        # Standard error may be closed, or a pipe that nobody reads.
        with suppress(OSError, ValueError):
            print(failure.detail, end="", file=sys.stderr, flush=True)
        saved_step = latest_step(self._run_dir / "checkpoints")
        self._restarts = self._restarts + 1 if saved_step == self._saved_step else 1
        begun = failure.step - self._start_step
        has_endured = saved_step > self._start_step and begun > _ENDURED_STEPS
        self._start_step = saved_step
        self._short_starts = 0 if has_endured else self._short_starts + 1
        self._saved_step = saved_step
        is_again = (
            self._last is not None and self._last.step == failure.step and not self._was_in_place
        )
        # It was tried again, and has not come as far as a step.
        was_gone = slot in self._gone and not failure.step
        is_by_rank = failure.cause is not IncidentKind.NOT_FINITE and failure.is_certain
        # Where work comes out wrong twice, the step does not matter: checks are not in each one.
        is_wrong = failure.cause is IncidentKind.CORRUPTION
        is_early = is_again or is_wrong or not failure.step
        is_lost = was_gone or (slot == self._last_slot and is_early)
        self._last = failure
        self._last_slot = slot
        self._was_in_place = False
        if self._has_all_ranks and failure.step:
            self._gone = frozenset()  # all took part in a step: they are back
            self._return_s = _RETURN_S
        if is_by_rank and is_lost and self._shrink(slot, failure, was_gone):
            # With fewer ranks, the next start to fail early is the first one.
            self._last = failure if failure.step else None
            return True
        is_worn_out = self._short_starts >= _MAX_SHORT_STARTS
        if is_again or is_worn_out:
            reason = _explain_end(failure) if is_again else _WORN_OUT
            note_end(self._run_dir, reason)
            self._tell(f"{failure}; {reason}")
            return False
        delay_s = min(_MAX_DELAY_S, 2.0 ** (self._restarts - 2)) if self._restarts > 1 else 0.0
        source = checkpoint_path(Path(), saved_step).name if saved_step else "the start"
        self._tell(f"{failure}; going on from {source} in {delay_s:.0f} s")
        time.sleep(delay_s)
        return True

    def _shrink(self, slot: int, failure: RankFailure, was_gone: bool) -> bool:
        """Leave a slot out, and plan for the others; return False where that cannot be."""
        if self._elasticity is None:
            return False
        gone = self._gone | {slot}
        left = [number for number in range(self._full_plan.layout.world_size) if number not in gone]
        plan = None
        for count in range(len(left), self._elasticity.min_ranks - 1, -1):
            plan = self._elasticity.replan(count)
            if plan is not None:
                break
        if plan is None:
            return False
        self._gone = gone
        self.plan = plan
        # There is no plan for every number of ranks: it may leave some idle.
        self.slots = tuple(left[: plan.layout.world_size])
        self._return_s = min(_MAX_RETURN_S, 2 * self._return_s) if was_gone else _RETURN_S
        self._shrunk_at_s = time.monotonic()
        count = plan.layout.world_size
        self._tell(
            f"{failure}; rank {slot} is gone: going on with {count} of "
            f"{self._full_plan.layout.world_size} ranks, {format_layout(plan.layout)}"
        )
        return True

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def _explain_end(failure: RankFailure) -> str:
    if not failure.step:
        return "gave up: two starts in a row have failed before their first step"
    if failure.cause is IncidentKind.NOT_FINITE:
        return (
            f"gave up: step {failure.step} was not finite twice, and is not skipped, for its "
            "gradients alone are not at fault"
        )
    return f"gave up: step {failure.step} has failed twice in a row"
