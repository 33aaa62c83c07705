"""`moewright plan`: search the layouts of a job and rank them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.options import AnswerOptions, JsonOption, PlanningOptions, RankingOptions

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.api.planning import Plans
    from moewright.search.misfit import Misfit

_NO_OPTIONS = PlanningOptions()
_DEFAULT_RANKING = RankingOptions()
_SHORT = AnswerOptions()


def plan(
    model: str,
    /,
    *,
    on: str = "",
    workload: PlanningOptions = _NO_OPTIONS,
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
    from moewright.api.planning import explain_empty_search, search_request
    from moewright.api.planning import why_not as find_objections
    from moewright.api.requests import read_plan_request, to_options, translate_fields
    from moewright.api.views import view_plans
    from moewright.codec import parse_layout

    request = read_plan_request(model, on, workload)
    # A layout that cannot be read is refused before the search, which may take a while.
    with translate_fields(to_options("--why-not")):
        parse_layout(ranking.why_not, world_size=request.hardware.count)
    plans = search_request(request, Path(model), ranking)
    objections: tuple[str, ...] = ()
    if ranking.why_not:
        objections = tuple(find_objections(plans, ranking.why_not).lines)
    if plans.best is None:
        with write_answer(None, json) as console:
            _print_answer(console, plans, objections, verbose=answer.verbose)
            misfits = _print_misfit(console, plans, ranking.layout)
        with write_answer(None, None, html=answer.html if misfits else None, views=lambda: misfits):
            pass
        raise explain_empty_search(request, plans.search, Path(model), layout=ranking.layout)
    with write_answer(
        plans.best, json, html=answer.html, views=lambda: view_plans(plans)
    ) as console:
        _print_answer(console, plans, objections, verbose=answer.verbose)
    return 0


def _print_misfit(console: Console, plans: Plans, layout: str) -> list[Misfit]:
    """Print the nearest miss and what would fit, each sentence as soon as it is known.

    Returns the last record of it, none where no layout is legal.
    """
    from moewright.api.misfits import view_misfit

    last: list[Misfit] = []
    printed = 0
    for misfit in view_misfit(plans, layout):
        lines = misfit.lines()
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
    from moewright.report.console import print_defaults, print_measured_load
    from moewright.report.plan_text import print_plans

    print_defaults(console, plans.request.defaults)
    print_plans(
        console,
        plans.plans,
        own=plans.own,
        gambles=plans.gambles,
        why=plans.why,
        rejected=plans.rejected,
        verbose=verbose,
    )
    for line in describe_trainers(plans.plans):
        console.print(line, soft_wrap=True)
    if plans.best:
        print_measured_load(console, plans.best, plans.even_routing)
    for line in objections:
        console.print(line, soft_wrap=True)
