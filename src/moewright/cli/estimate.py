"""`moewright estimate`: one layout's memory, time and verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.exit_codes import DOES_NOT_FIT
from moewright.cli.options import JsonOption, LaunchScriptOptions, PictureOptions, PlanningOptions
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.api.launch_scripts import BetterLayouts

_NO_OPTIONS = PlanningOptions()
_NO_SCRIPT = LaunchScriptOptions()
_NO_PICTURES = PictureOptions()


def estimate(
    model: str = "",
    /,
    *,
    on: str = "",
    layout: str = "",
    workload: PlanningOptions = _NO_OPTIONS,
    script: LaunchScriptOptions = _NO_SCRIPT,
    json: JsonOption = None,
    pictures: PictureOptions = _NO_PICTURES,
) -> int:
    """Predict memory by component and module, time by component, and whether one layout fits.

    With --from-flags, also what would be better. Exit codes: 0 the layout fits, or may (verdict
    fits or uncertain), 2 bad input, 3 the layout does not fit (verdict oom).

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; a job .toml; or
        a plan, as `plan --json` or `estimate --json` wrote it, whose values the options replace.
        A launch script that gives the model's sizes needs none.
    on
        Hardware as count x device, "256xH800" or "2xruns/machine.toml"; a job brings its own, and a
        launch script the count.
    layout
        The layout, such as "tp2,ep8,pp32,vpp3,mbs1,recompute=select"; dp is derived. A job brings
        its own.
    json
        Write the plan of this layout (model, workload, hardware, layout, estimate) to this file;
        "-": to standard output, and the tables to standard error.
    """
    from moewright.api.launch_scripts import find_better_layouts, read_flags
    from moewright.api.planning import estimate_even_routing, estimate_request
    from moewright.api.views import view_estimate
    from moewright.diagnosis.judgement import judge_quickly
    from moewright.report.console import print_defaults, print_estimate, print_measured_load
    from moewright.report.trace import write_trace
    from moewright.search.imbalance import explain_imbalance
    from moewright.spec.plan import Verdict

    better = None
    if script.from_flags is not None:
        _refuse_options_of_script(layout, workload)
        reading = read_flags(
            script.from_flags,
            on=on,
            model=model,
            arguments=script.script_args,
            network=workload.network,
            strict=script.strict,
        )
        plan, notes = reading.plan, reading.notes
        better = find_better_layouts(plan)
        judgement = better.judgement
    else:
        plan, notes = estimate_request(model, layout, on=on, options=workload)
        judgement = judge_quickly(plan)
    if pictures.trace is not None:
        write_trace(plan, pictures.trace)
    with write_answer(
        plan,
        json,
        html=pictures.html,
        views=lambda: view_estimate(plan, notes, judgement),
        written=(pictures.trace,),
    ) as console:
        if better is not None:
            print_script_plan(console, better, notes, is_verbose=script.verbose)
        else:
            print_defaults(console, notes)
            print_estimate(console, plan, judgement, verbose=script.verbose)
        print_measured_load(console, plan, estimate_even_routing(plan))
        if script.verbose:
            for line in explain_imbalance(plan):
                console.print(line, soft_wrap=True, markup=False)
    return DOES_NOT_FIT if plan.estimate.verdict is Verdict.OOM else 0


def print_script_plan(
    console: Console, better: BetterLayouts, notes: tuple[str, ...], *, is_verbose: bool
) -> None:
    """Print the verdict on a launch script's job, what would be better, and on demand the rest."""
    from moewright.report.console import print_estimate_parts, print_verdict
    from moewright.report.plan_text import print_ranking

    print_verdict(console, better.own, better.judgement)
    console.print("What would be better", style="bold")
    if better.plans:
        print_ranking(console, better.plans, picked=(better.own,))
    for line in (better.advice, *better.changes):
        console.print(line, soft_wrap=True, markup=False)
    for line in notes:
        console.print(line, soft_wrap=True, markup=False)
    if is_verbose:
        print_estimate_parts(console, better.own, verbose=True)
    else:
        console.print("Memory, time and assumptions: -v")


def _refuse_options_of_script(layout: str, workload: PlanningOptions) -> None:
    """Refuse the options whose values a launch script states."""
    values = {
        "--layout": layout,
        "--seq-len": workload.seq_len,
        "--global-batch": workload.global_batch,
        "--precision": workload.precision,
        "--steps": workload.steps,
        "--tokens": workload.tokens,
        "--load": workload.load,
        "--lengths": workload.lengths,
        "--task": workload.task,
        "--lora": workload.lora_rank,
    }
    for option, value in values.items():
        if value:
            rule = "the script of --from-flags says it"
            raise BadInput(Reason(field=option, rule=rule, nearest="leave it out"))
