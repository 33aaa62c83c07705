"""`moewright tune`: from a job's layout to a better one, by trials here or by predictions."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import print_now, reserve_stdout, write_answer
from moewright.cli.exit_codes import NOTHING_VALID, STOPPED, exit_code
from moewright.cli.option_types import Flag, SetOption
from moewright.cli.options import TuningOutputs
from moewright.cli.progress import open_display
from moewright.spec.errors import BadInput, Reason

_HERE = TuningOutputs()


def tune(
    job: Path,
    /,
    *,
    budget_minutes: float = 0.0,
    on: str = "",
    predict: Flag = False,
    out: Path | None = None,
    set_: SetOption = None,
    trials: TuningOutputs = _HERE,
) -> int:
    """Tune the layout of a job by trials: fit, scale, profile, retune one variable, validate.

    A trial is a short run of the engine on this machine, or a job of a scheduler, of the engine or
    of Megatron-LM (--launcher, --trainer); one that is far slower is ended early. A gain is one
    whose interval over pairs of runs, taken in turns, excludes noise. The winner runs 50 steps
    more. The same command goes on where it was stopped; report.md in the folder tells what was
    tried, plan.json is what `train` takes up, machine.toml the refitted hardware.

    Parameters
    ----------
    job
        The job file. Its layout is where tuning starts; its section tune says what may change,
        absent: whatever is usual.
    budget_minutes
        Stop trying after so long, and validate; no limit when not given.
    on
        Another machine, count x device; with --predict, or where trials do not run here.
    predict
        Run nothing: the same procedure over predictions.
    out
        The folder of the tuning; `runs/<name of the job file>_tune` when not given.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    """
    from moewright.api import tuning
    from moewright.codec import PLAN_FILE
    from moewright.launching.launched_trials import TrialStoppedError
    from moewright.report.tuning_document import build_tuning_document, summarize_tuning
    from moewright.spec.finding import Basis
    from moewright.spec.record import Record
    from moewright.view.plan_view import build_plan_view

    tuning.check_budget(budget_minutes)
    if on and not predict and trials.is_in_process:
        rule = "trials run on this machine"
        raise BadInput(Reason(field="--on", value=on, rule=rule, nearest="--predict beside it"))
    folder = out or Path("runs") / f"{job.stem}_tune"
    try:
        # Trials print too, as processes of their own.
        with reserve_stdout(trials.json):
            request = tuning.read_tuning_request(
                job,
                on=on,
                predict=predict,
                overrides=tuple(set_ or ()),
                tell=print_now,
                place=trials,
            )
            if predict:
                answer = tuning.tune_by_predictions(request, folder, print_now)
            else:
                answer = tuning.tune_by_trials(
                    request,
                    folder,
                    budget_minutes=budget_minutes,
                    tell=print_now,
                    place=trials,
                    # Every trial draws a panel of its own.
                    display=open_display(is_quiet=trials.quiet, is_kept=False),
                )
    except TrialStoppedError:
        print_now(f"stopped; the same command goes on with {folder}")
        return STOPPED
    basis = Basis.PREDICTED if predict else Basis.MEASURED
    records: list[Record] = []
    if trials.html is not None:
        records.append(build_tuning_document(request.contract, answer.result, basis=basis))
        if answer.plan is not None:
            records.append(build_plan_view(answer.plan))
    report_path = folder / tuning.REPORT_FILE
    lines = [f"no layout was found valid; {report_path} tells why"]
    if answer.plan is not None:
        lines = [
            *summarize_tuning(answer.result, basis=basis),
            f"{report_path} tells what was tried, {folder / PLAN_FILE} is its plan",
        ]
    with reserve_stdout(trials.json):
        print_now("\n".join(lines))
    with write_answer(answer, trials.json, html=trials.html, views=lambda: records):
        pass
    return exit_code(holds=answer.plan is not None, otherwise=NOTHING_VALID)
