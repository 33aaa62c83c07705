"""`moewright bench tune`: how near tuning comes to the best of its space, and in how many
trials."""

from __future__ import annotations

import sys
import time
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.tuning.space import TuningPoint, TuningSpace
    from moewright.tuning.trials import RunTrial, TrialOutcome

MAX_ROUNDS = 100
_DUEL = 5  # pairs of the winner and the best of all


def bench_tune(
    job: Path,
    /,
    *,
    rounds: int = 2,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
) -> int:
    """Tune a job, then run every point of its section tune, and say how near the winner comes to
    the best of them.

    All points run once a round, so that what the machine does meanwhile meets them alike; the best
    and the winner then run in turns. The same command goes on where it was stopped.

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
    from moewright.cli.tune import NOTHING_VALID, read_tuning_request, run_trial, tune
    from moewright.codec import read_json, write_text
    from moewright.report.console import make_console
    from moewright.report.tuning_markdown import render_exhaustive
    from moewright.spec.plan import Plan
    from moewright.tuning.journal import Journal, read_journal
    from moewright.tuning.space import point_from_job
    from moewright.tuning.trials import TrialLength

    if not 1 <= rounds <= MAX_ROUNDS:
        close = str(min(max(rounds, 1), MAX_ROUNDS))
        raise BadInput(
            Reason(
                field="--rounds",
                value=str(rounds),
                rule=f"must be in 1..{MAX_ROUNDS}",
                nearest=close,
            )
        )
    folder = out or Path("runs") / f"{job.stem}_bench"
    space = read_tuning_request(job, on="", predict=False, overrides=tuple(set_ or ())).space
    points = space.list_points()
    if code := tune(job, out=folder / "tune", set_=set_):
        return code
    plan = read_json(Plan, folder / "tune" / "plan.json")
    winner = point_from_job(plan.layout, plan.workload)
    journal = Journal(folder / "all", partial(run_trial, folder / "all"), time.monotonic)
    seconds: dict[TuningPoint, list[float]] = {}
    for number in range(1, rounds + 1):
        turn = (
            points if number % 2 else points[::-1]
        )  # a drift of the machine meets no end of the list twice
        for point in turn:
            outcome = _run(space, journal, point, number)
            if outcome.step_s:
                seconds.setdefault(point, []).append(outcome.step_s)
            print(f"round {number}: {point}: {outcome.step_s:.4f} s", flush=True)
    means = {point: exp(fmean(map(log, found))) for point, found in seconds.items()}
    if winner not in means:
        return NOTHING_VALID
    best = min(means, key=lambda point: means[point])
    duel = []
    for number in range(rounds + 1, rounds + 1 + _DUEL) if best != winner else ():
        order = (winner, best) if number % 2 else (best, winner)
        of = {point: _run(space, journal, point, number).step_s for point in order}
        duel += [(of[winner], of[best])] if all(of.values()) else []
    trials = [
        trial for trial in read_journal(folder / "tune") if trial.length is TrialLength.SCREEN
    ]
    text = render_exhaustive(
        means,
        runs=len(points) * rounds,
        winner=winner,
        best=best,
        paired_s=duel,
        tuning_points=len({trial.point for trial in trials}),
        tuning_runs=len(trials),
    )
    make_console(sys.stdout).print(text, soft_wrap=True, markup=False, highlight=False)
    write_text(folder / "report.md", text)
    return 0


def _run(space: TuningSpace, run_one: RunTrial, point: TuningPoint, repeat: int) -> TrialOutcome:
    from moewright.search.search import build_plan
    from moewright.tuning.trial_runner import trial_workload
    from moewright.tuning.trials import TrialLength, TrialRequest

    workload = point.apply_to(trial_workload(space.workload, TrialLength.SCREEN))
    plan = build_plan(space.model, workload, space.hardware, point.layout)
    return run_one(TrialRequest(point=point, length=TrialLength.SCREEN, repeat=repeat, plan=plan))
