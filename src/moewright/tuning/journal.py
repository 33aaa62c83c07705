"""The journal of a tuning: a line of JSON a run, so that a tuning that was killed can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from moewright.codec import (
    FloatPolicy,
    append_line,
    from_data,
    parse_json,
    read_complete_lines,
    to_data,
)
from moewright.spec.errors import BadInput, Reason
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import (
    Announce,
    RunTrial,
    Trial,
    TrialLength,
    TrialOutcome,
    TrialRequest,
)

JOURNAL_FILE = "journal.jsonl"

_TrialKey = tuple[TuningPoint, TrialLength, int]


class Journal:
    """A runner of trials that makes each run once: a run that the file holds is read from it.

    The procedure asks for the same runs in the same order every time, so the file is enough to
    resume a tuning.
    """

    def __init__(self, folder: Path, run_one: RunTrial, clock: Callable[[], float]) -> None:
        self._path = folder / JOURNAL_FILE
        self._run_one = run_one
        self._clock = clock
        self._trials: dict[_TrialKey, Trial] = {
            (trial.point, trial.length, trial.repeat): trial for trial in read_journal(folder)
        }
        self._last_ended_s = clock()

    def holds(self, request: TrialRequest) -> bool:
        """Tell whether a run was made."""
        return (request.point, request.length, request.repeat) in self._trials

    def __call__(self, request: TrialRequest) -> TrialOutcome:
        """Return the outcome of the run; a run made now is on disk before it is returned."""
        key = (request.point, request.length, request.repeat)
        if key not in self._trials:
            outcome = self._run_one(request)
            spent_s = self._clock() - self._last_ended_s
            trial = Trial(
                point=request.point,
                length=request.length,
                repeat=request.repeat,
                predicted_s=request.plan.estimate.step_s,
                outcome=replace(outcome, spent_s=spent_s),
            )
            append_line(self._path, json.dumps(to_data(trial)))
            self._trials[key] = trial
        self._last_ended_s = self._clock()
        return self._trials[key].outcome


def announce_new(journal: Journal, announce: Announce) -> Announce:
    """Return an announcement of the runs that a journal does not hold yet."""

    def announce_missing(requests: Sequence[TrialRequest]) -> None:
        announce([request for request in requests if not journal.holds(request)])

    return announce_missing


def read_journal(folder: Path) -> tuple[Trial, ...]:
    """Read the runs of a tuning so far, in the order they were made.

    Raises:
        BadInput: a line is damaged.
    """
    path = folder / JOURNAL_FILE
    trials = []
    for number, line in enumerate(read_complete_lines(path), 1):
        where = f"{path}:{number}"
        try:
            data = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
            trials.append(from_data(Trial, data, where=where, floats=FloatPolicy.NON_FINITE))
        except BadInput as error:
            rule = f"is no line of a tuning's journal ({error.reasons[0].rule})"
            raise BadInput(Reason(field=where, rule=rule, nearest="another --out")) from None
    return tuple(trials)
