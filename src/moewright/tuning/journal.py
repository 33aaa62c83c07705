"""The journal of a tuning: a line of JSON a run, so that one that was killed goes on where it
stood."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from moewright.tuning.trials import RunTrial, Trial, TrialLength, TrialOutcome, TrialRequest

JOURNAL_FILE = "journal.jsonl"


class Journal:
    """Makes runs, each once: one that the file holds is read from it. The procedure asks for the
    same runs in the same order every time, so that is all there is to going on.
    """

    def __init__(self, folder: Path, run_one: RunTrial, clock: Callable[[], float]) -> None:
        self._path, self._run_one, self._clock = folder / JOURNAL_FILE, run_one, clock
        self._known = {
            _key(trial.point, trial.length, trial.repeat): trial for trial in read_journal(folder)
        }
        self._since = clock()

    def __call__(self, ask: TrialRequest) -> TrialOutcome:
        """The outcome of the run. One that is made now is on disk before it is returned."""
        key = _key(ask.point, ask.length, ask.repeat)
        if key not in self._known:
            outcome = self._run_one(ask)
            spent_s = self._clock() - self._since
            trial = Trial(
                point=ask.point,
                length=ask.length,
                repeat=ask.repeat,
                predicted_s=ask.plan.estimate.step_s,
                outcome=replace(outcome, spent_s=spent_s),
            )
            append_line(self._path, json.dumps(to_data(trial)))
            self._known[key] = trial
        self._since = self._clock()
        return self._known[key].outcome


def _key(
    point: TuningPoint, length: TrialLength, repeat: int
) -> tuple[TuningPoint, TrialLength, int]:
    return point, length, repeat


def read_journal(folder: Path) -> tuple[Trial, ...]:
    """The runs of a tuning so far, in the order they were made. Raises BadInput for a damaged
    line."""
    path = folder / JOURNAL_FILE
    found = []
    for number, line in enumerate(read_complete_lines(path), 1):
        where = f"{path}:{number}"
        try:
            data = parse_json(line, where=where, floats=FloatPolicy.NON_FINITE)
            found.append(from_data(Trial, data, where=where, floats=FloatPolicy.NON_FINITE))
        except BadInput as error:
            rule = f"is no line of a tuning's journal ({error.reasons[0].rule})"
            raise BadInput(Reason(field=where, rule=rule, nearest="another --out")) from None
    return tuple(found)
