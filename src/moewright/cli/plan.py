"""Verbs that plan: a job's best layouts, one layout of it, a budget of tokens, a model's design."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.exit_codes import DOES_NOT_FIT, exit_code
from moewright.cli.option_types import JsonOption
from moewright.cli.options import (
    AnswerOptions,
    AxesOptions,
    BatchOptions,
    BudgetOutputs,
    CalendarOptions,
    DesignOutputs,
    LaunchScriptOptions,
    PictureOptions,
    PlanningOptions,
    RankingOptions,
    ShapeOptions,
)
from moewright.cli.progress import show_share
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.api.launch_scripts import BetterLayouts
    from moewright.api.planning import Plans
    from moewright.search.misfit import Misfit
    from moewright.spec.plan import Estimate, Plan


_NO_PLANNING = PlanningOptions()
_NO_AXES = AxesOptions()
_DEFAULT_RANKING = RankingOptions()
_SHORT = AnswerOptions()


def plan(
    model: str,
    /,
    *,
    on: str = "",
    workload: AxesOptions = _NO_AXES,
    ranking: RankingOptions = _DEFAULT_RANKING,
    answer: AnswerOptions = _SHORT,
    json: JsonOption = None,
) -> int:
    """Rank the layouts of MODEL on some hardware by predicted step time, with memory and reasons.

    Layouts that fit come first; faster ones that may not fit are listed apart. A job's own layout
    keys are compared with the best; --layout pins keys.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; the id of a model
        of the hub; or a job .toml.
    on
        Hardware as count x device, "256xH800" or "2xruns/machine.toml"; a job brings its own.
    json
        Write the best plan (model, workload, hardware, layout, estimate) to this file; "-": to
        standard output, and the tables to standard error.
    """
    from moewright.api.job_axes import search_axes
    from moewright.api.planning import explain_empty_search
    from moewright.api.planning import why_not as find_objections
    from moewright.api.requests import read_plan_request, to_options, translate_fields
    from moewright.api.views import view_plans
    from moewright.codec import parse_layout

    stated, axes = workload.split()
    request = read_plan_request(model, on, stated)
    # A layout that cannot be read is refused before the search, which may take a while.
    with translate_fields(to_options("--why-not")):
        parse_layout(ranking.why_not, world_size=request.hardware.count)
    plans = search_axes(request, Path(model), axes, ranking)
    objections: tuple[str, ...] = ()
    if ranking.why_not:
        objections = tuple(find_objections(plans, ranking.why_not).lines)
    if plans.best is None:
        with write_answer(None, json) as console:
            _print_answer(console, plans, objections, verbose=answer.verbose)
            misfits = _print_misfit(console, plans, ranking.layout)
        # The page is written when the last record is there.
        with write_answer(None, None, html=answer.html if misfits else None, views=lambda: misfits):
            pass
        raise explain_empty_search(plans.request, plans.search, Path(model), layout=ranking.layout)
    with write_answer(
        plans.best, json, html=answer.html, views=lambda: view_plans(plans)
    ) as console:
        _print_answer(console, plans, objections, verbose=answer.verbose)
    return 0


def _print_misfit(console: Console, plans: Plans, layout: str) -> list[Misfit]:
    """Print the nearest miss and what would fit, each sentence as soon as it is known.

    Returns the last record of it, none where no layout is legal.
    """
    from moewright.api.judging import view_misfit

    last: list[Misfit] = []
    printed = 0
    for misfit in view_misfit(plans, layout):
        lines = misfit.lines()
        # Each record has the lines of the one before, too.
        for line in lines[printed:]:
            console.print(line)
        printed = len(lines)
        last = [misfit]
    return last


def _print_answer(
    console: Console, plans: Plans, objections: Iterable[str], *, verbose: bool
) -> None:
    """Print the ranking, what its first rests on, and who starts each plan."""
    from moewright.api.running import describe_trainers
    from moewright.report.console import print_defaults, print_on_a_screen
    from moewright.report.plan_text import print_choices, print_plans
    from moewright.search.switches import explain_switches

    # Published figures in 8 and 4 bits are of jobs with these switches set: what is above a plan's
    # may be another job.
    says_switches = verbose or plans.request.workload.precision.is_narrow
    switches = explain_switches(plans.best) if says_switches and plans.best else ()
    # Read once: an answer may be drawn several times until it fits a screen.
    starts = tuple(describe_trainers(plans.plans))
    objections = tuple(objections)

    def draw(reasons: Sequence[str]) -> None:
        print_defaults(console, plans.request.defaults)
        print_plans(
            console,
            plans.plans,
            own=plans.own,
            gambles=plans.gambles,
            why=reasons,
            rejected=plans.rejected,
            verbose=verbose,
        )
        print_choices(console, plans.choices)
        for line in starts:
            console.print(line)
        if plans.best:
            _print_measured_load(console, plans.best, plans.even_routing)
        for line in objections:
            console.print(line)

    reasons = (*plans.why, *switches)
    if verbose:
        draw(reasons)
    else:
        print_on_a_screen(console, reasons, draw)


def _print_measured_load(console: Console, plan: Plan, even: Estimate | None) -> None:
    """Print what a measured load costs, where one was measured: then there is an even estimate."""
    from moewright.report.estimate_document import describe_measured_load

    if even is not None:
        console.print(describe_measured_load(plan, even))


_NO_SCRIPT = LaunchScriptOptions()
_NO_PICTURES = PictureOptions()


def estimate(
    model: str = "",
    /,
    *,
    on: str = "",
    layout: str = "",
    workload: PlanningOptions = _NO_PLANNING,
    script: LaunchScriptOptions = _NO_SCRIPT,
    json: JsonOption = None,
    pictures: PictureOptions = _NO_PICTURES,
) -> int:
    """Predict memory by component and module, time by component, and whether one layout fits.

    With --from-flags, also what would be better.

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
    from moewright.api.placing import write_places
    from moewright.api.planning import estimate_even_routing, estimate_request
    from moewright.api.views import view_estimate
    from moewright.diagnosis.judgement import judge_quickly
    from moewright.report.console import print_defaults
    from moewright.report.document_text import print_sections
    from moewright.report.estimate_document import build_estimate_parts, build_verdict
    from moewright.report.trace import write_trace
    from moewright.search.explain import explain_precision
    from moewright.search.misfit import explain_imbalance
    from moewright.search.switches import explain_switches
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
            overrides=script.set_ or (),
        )
        plan, notes = reading.plan, reading.notes
        better = find_better_layouts(plan, reading.options)
        judgement = better.judgement  # judged beside the job with all changes that help
    else:
        plan, notes = estimate_request(model, layout, on=on, options=workload)
        judgement = judge_quickly(plan)
    if pictures.trace is not None:
        write_trace(plan, pictures.trace)
    places = None
    if pictures.places is not None:
        places = write_places(plan, pictures.places)
    with write_answer(
        plan,
        json,
        html=pictures.html,
        views=lambda: view_estimate(plan, notes, judgement),
        written=(pictures.trace, pictures.places),
    ) as console:
        if better is not None:
            print_script_plan(console, better, notes, is_verbose=script.verbose)
        else:
            print_defaults(console, notes)
            sections = (build_verdict(plan, judgement), *build_estimate_parts(plan))
            print_sections(console, sections, verbose=script.verbose)
            # Who asks for fewer bits is told what they bring; in 16, what they would, on demand.
            if plan.workload.precision.is_narrow or script.verbose:
                for line in explain_precision(plan):
                    console.print(line)
        _print_measured_load(console, plan, estimate_even_routing(plan))
        if places is not None:
            console.print(places.title())
        if script.verbose:
            for line in (*explain_switches(plan), *explain_imbalance(plan)):
                console.print(line)
    return exit_code(holds=plan.estimate.verdict is not Verdict.OOM, otherwise=DOES_NOT_FIT)


def print_script_plan(
    console: Console, better: BetterLayouts, notes: tuple[str, ...], *, is_verbose: bool
) -> None:
    """Print the verdict on a launch script's job, what would be better, and on demand the rest."""
    from moewright.report.document_text import print_sections
    from moewright.report.estimate_document import build_estimate_parts, build_verdict
    from moewright.report.finding_sections import build_advice_section, describe_step
    from moewright.report.plan_text import print_ranking
    from moewright.spec.plan import Verdict

    print_sections(console, (build_verdict(better.own, better.judgement),))
    if better.change_list is not None:
        console.print(describe_step(better.own, 0.0, None))
    console.print("What would be better", style="bold")
    if is_verbose:
        print_ranking(console, better.plans, picked=(better.own,))
    if better.change_list is None or better.own.estimate.verdict is Verdict.OOM:
        console.print(better.advice)
    if better.change_list is not None:
        print_sections(console, (build_advice_section(better.change_list),), verbose=is_verbose)
    if not better.own.hardware.device.kind.runs_cuda:
        for line in better.changes:
            console.print(line)
    for line in notes:
        console.print(line)
    if is_verbose:
        print_sections(console, build_estimate_parts(better.own), verbose=True)
    else:
        console.print("Plans side by side, memory, time and assumptions: -v")


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


_NO_WORKLOAD = BatchOptions()
_NO_CALENDAR = CalendarOptions()
_NO_OUTPUTS = BudgetOutputs()


def budget(
    model: str,
    /,
    *,
    on: str = "",
    tokens: str,
    workload: BatchOptions = _NO_WORKLOAD,
    options: CalendarOptions = _NO_CALENDAR,
    outputs: BudgetOutputs = _NO_OUTPUTS,
) -> int:
    """Tell what training MODEL on so many tokens takes in days and device-hours.

    Each number of devices gets its best plan that fits, with the same global batch. With --mtbf
    days are by the calendar too.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml.
    on
        Hardware as count x device, "256xH800"; a job brings its own.
    tokens
        Tokens to train on, such as 15T or 500B.
    """
    from moewright.api.budgets import build_budget_document, compute_budget
    from moewright.report.console import print_defaults
    from moewright.report.document_text import print_document

    answer = compute_budget(model, on, workload, tokens=tokens, options=options)
    document = build_budget_document(answer)
    with write_answer(answer, outputs.json, html=outputs.html, views=lambda: [document]) as console:
        print_defaults(console, answer.request.defaults)
        print_document(console, document, verbose=outputs.verbose)
    return 0


_NO_SHAPES = ShapeOptions()
_NO_DESIGN_OUTPUTS = DesignOutputs()


def design(
    *,
    on: str,
    like: str = "Qwen3-30B-A3B",
    workload: BatchOptions = _NO_WORKLOAD,
    options: ShapeOptions = _NO_SHAPES,
    outputs: DesignOutputs = _NO_DESIGN_OUTPUTS,
) -> int:
    """Find the shape of model with the least predicted loss in the time, and its plan.

    Shapes of other width, depth, number of experts, experts a token and width of experts are
    compared by published laws of the loss, by the tokens that they see in the time, and by size.

    Parameters
    ----------
    on
        Hardware as count x device, "256xH100".
    like
        The model whose family, attention, router and vocabulary the shapes have.
    """
    from moewright.api.design_document import build_design_document
    from moewright.api.designing import compute_design
    from moewright.report.document_text import print_document

    with show_share("comparing shapes") as show:
        answer = compute_design(
            on,
            like,
            workload,
            options,
            report_progress=lambda done, total: show(done / total),
        )
    document = build_design_document(answer)
    written: tuple[Path, ...] = ()
    if options.out is not None:
        written = tuple(options.out / name for name in ("config.json", "plan.json", "job.toml"))
    with write_answer(
        answer, outputs.json, html=outputs.html, views=lambda: [document], written=written
    ) as console:
        print_document(console, document, verbose=outputs.verbose)
    return 0
