"""`python -m benchmarks.tuning`: how near tuning comes to the best, and in how many trials."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Annotated

from cyclopts import Parameter

from benchmarks.command import run_command
from moewright.api.tuning import (
    read_tuning_request,
    run_trial,
    tune_by_trials,
)
from moewright.codec import write_text
from moewright.launching.launched_trials import TrialStoppedError
from moewright.report.console import make_console
from moewright.report.document import render_markdown
from moewright.report.document_text import print_document
from moewright.report.tuning_document import build_exhaustive_document
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput, Reason
from moewright.tuning.journal import Journal, read_journal
from moewright.tuning.space import TuningPoint, TuningSpace, point_from_job
from moewright.tuning.trial_runner import trial_workload
from moewright.tuning.trials import TrialLength, TrialOutcome, TrialRequest

# Exit codes.
NOTHING_VALID = 1
STOPPED = 143
MAX_ROUNDS = 100
# Pairs in which the winner and the best of all run in turns.
_PAIRS = 5


def compare_tuning(
    job: Path,
    /,
    *,
    rounds: int = 2,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
) -> int:
    """Tune a job, then run every point of its section tune and compare the winner with the best.

    All points run once a round, so that other work of the machine slows them alike; the best and
    the winner then run in turns. The same command goes on where it was stopped.

    Parameters
    ----------
    job
        A job file whose section tune spells out the space.
    rounds
        Runs of every point.
    out
        The folder; runs/<name of the job file>_bench when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    """
    if not 1 <= rounds <= MAX_ROUNDS:
        rule = f"must be in 1..{MAX_ROUNDS}"
        nearest = str(min(max(rounds, 1), MAX_ROUNDS))
        raise BadInput(Reason(field="--rounds", value=str(rounds), rule=rule, nearest=nearest))
    folder = out or Path("runs") / f"{job.stem}_bench"
    overrides = tuple(set_ or ())
    tell = partial(print, flush=True)
    request = read_tuning_request(job, on="", predict=False, overrides=overrides, tell=tell)
    space = request.space
    try:
        plan = tune_by_trials(request, folder / "tune", budget_minutes=0.0, tell=tell).plan
    except TrialStoppedError:
        print(f"stopped; the same command goes on with {folder}", flush=True)
        return STOPPED
    if plan is None:
        return NOTHING_VALID
    winner = point_from_job(plan.layout, plan.workload)
    journal = Journal(folder / "all", partial(run_trial, folder / "all"), time.monotonic)
    points = space.list_points()
    means = _measure_points(space, journal, points, rounds)
    if winner not in means:
        return NOTHING_VALID
    best = min(means, key=lambda point: means[point])
    paired_s = []
    if best != winner:
        paired_s = _measure_pairs(space, journal, (winner, best), first_repeat=rounds + 1)
    journalled = read_journal(folder / "tune")
    trials = [trial for trial in journalled if trial.length is TrialLength.SCREEN]
    document = build_exhaustive_document(
        means,
        runs=len(points) * rounds,
        winner=winner,
        best=best,
        paired_s=paired_s,
        tuning_points=len({trial.point for trial in trials}),
        tuning_runs=len(trials),
    )
    print_document(make_console(sys.stdout), document)
    write_text(folder / "report.md", render_markdown(document))
    return 0


def _measure_points(
    space: TuningSpace, journal: Journal, points: Sequence[TuningPoint], rounds: int
) -> Mapping[TuningPoint, float]:
    """Return the mean seconds a step of every point that runs, the geometric mean over rounds."""
    seconds: dict[TuningPoint, list[float]] = {}
    for number in range(1, rounds + 1):
        # Every second round goes backwards, so that a drift of the machine favours no point.
        ordered = points if number % 2 else points[::-1]
        for point in ordered:
            outcome = _run_point(space, journal, point, number)
            if outcome.step_s:
                seconds.setdefault(point, []).append(outcome.step_s)
            print(f"round {number}: {point}: {outcome.step_s:.4f} s", flush=True)
    return {point: exp(fmean(map(log, steps_s))) for point, steps_s in seconds.items()}


def _measure_pairs(
    space: TuningSpace,
    journal: Journal,
    pair: tuple[TuningPoint, TuningPoint],
    *,
    first_repeat: int,
) -> list[tuple[float, float]]:
    """Run two points in turns, and return their seconds a step where both ran."""
    first, second = pair
    paired_s = []
    for number in range(first_repeat, first_repeat + _PAIRS):
        order = (first, second) if number % 2 else (second, first)
        step_s = {point: _run_point(space, journal, point, number).step_s for point in order}
        if all(step_s.values()):
            paired_s.append((step_s[first], step_s[second]))
    return paired_s


def _run_point(
    space: TuningSpace, journal: Journal, point: TuningPoint, repeat: int
) -> TrialOutcome:
    workload = point.apply_to(trial_workload(space.workload, TrialLength.SCREEN))
    plan = build_plan(space.model, workload, space.hardware, point.layout)
    return journal(TrialRequest(point=point, length=TrialLength.SCREEN, repeat=repeat, plan=plan))


if __name__ == "__main__":
    run_command("benchmarks.tuning", compare_tuning)
