"""`moewright train`: plan a job (or take up its plan), run it, and write its report."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import print_nothing, print_now
from moewright.cli.displays import open_display
from moewright.cli.exit_codes import STOPPED
from moewright.cli.options import EnduranceOptions, Flag, OptionalCount, Quiet, SetOption
from moewright.cli.stop_signals import answer_stops
from moewright.spec.errors import BadInput, Reason

_NO_OPTIONS = EnduranceOptions()


def train(
    job: Path,
    /,
    *,
    nproc: OptionalCount = None,
    out: Path | None = None,
    set_: SetOption = None,
    extend: Flag = False,
    quiet: Quiet = False,
    endurance: EnduranceOptions = _NO_OPTIONS,
) -> int:
    """Train a job, and resume it where its run folder stands.

    The same command also runs under torchrun. Exit codes: 0 done, 2 bad input, 3 a rank failed,
    143 saved on SIGTERM.

    Parameters
    ----------
    job
        The job file, with sections model, data, layout, train, checkpoint; or a plan, as
        `plan --json`, `estimate --json` or `tune` wrote it, which is run as it stands.
    nproc
        Processes to start; the job's own number when not given.
    out
        The run folder; runs/<name of the job file> when not given. A plan needs it.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    extend
        When the run has done all its steps, do as many again.
    quiet
        Show nothing while it trains, neither a panel on a terminal nor a line a step elsewhere.
    """
    from moewright.api.planning import is_plan_file
    from moewright.api.reporting import (
        build_report,
        describe_outcome,
        write_comparisons,
        write_page,
    )
    from moewright.api.training import (
        TrainingRequest,
        describe_stop,
        is_first_rank,
        prepare_training,
        run_training,
    )

    endurance.check()
    if out is None:
        if is_plan_file(job):
            rule = "is needed with a plan: the run folder"
            raise BadInput(Reason(field="--out", rule=rule, nearest=f"runs/{job.stem}"))
        out = Path("runs") / job.stem
    request = TrainingRequest(
        path=job,
        run_dir=out,
        nproc=nproc,
        overrides=tuple(set_ or ()),
        extend=extend,
        falls_back=endurance.fall_back,
        supervises=endurance.supervise,
        min_ranks=endurance.min_ranks,
    )
    reports = is_first_rank()

    def run() -> int:
        plan = prepare_training(request, print_now if reports else print_nothing)
        code = run_training(plan, request, open_display(is_quiet=quiet))
        if code == STOPPED and reports:
            print_now(describe_stop(out))
        if code == 0 and reports:
            report = build_report(out)
            written = [write_page(report, out / "report.html")]
            if report.comparisons:
                written.append(write_comparisons(report, out))
            print(*describe_outcome(report, out, written), sep="\n")
        return code

    return answer_stops(run)
