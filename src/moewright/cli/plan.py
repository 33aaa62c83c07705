"""`moewright plan`: search the layouts of a job and rank them."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import open_console, write_answer
from moewright.cli.options import JsonOption, PlanningOptions

_NO_OPTIONS = PlanningOptions()


def plan(
    model: str,
    /,
    *,
    on: str = "",
    workload: PlanningOptions = _NO_OPTIONS,
    top: int = 5,
    why_not: str = "",
    json: JsonOption = None,
) -> int:
    """Rank the layouts of MODEL on some hardware by predicted step time, with memory and reasons.

    A job's layout keys decide which is picked; the ranking shows what else there is.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml.
    on
        Hardware as count x device, "256xH800" or "2xruns/machine.toml"; a job brings its own.
    top
        How many layouts to show.
    why_not
        A layout, such as "tp2,ep8,pp4": say what speaks against it.
    json
        Write the best plan (model, workload, hardware, layout, estimate) to this file; "-": to
        standard output, and the tables to standard error.
    """
    from moewright.api.planning import explain_empty_search, search_request
    from moewright.api.planning import why_not as find_objections
    from moewright.api.requests import read_plan_request, to_options, translate_fields
    from moewright.codec import parse_layout
    from moewright.report.console import print_measured_load, print_plans

    request = read_plan_request(model, on, workload.to_workload_options())
    # A layout that cannot be read is refused before the search, which may take a while.
    with translate_fields(to_options("--why-not")):
        parse_layout(why_not, world_size=request.hardware.count)
    plans = search_request(request, Path(model), top=top)
    console = open_console(json)
    for line in request.defaults:
        console.print(line, soft_wrap=True)
    if request.layout_text and plans.best:
        console.print(f"layout {request.layout_text} (given by the job)", soft_wrap=True)
    print_plans(
        console,
        plans.plans,
        picked=[plans.best] if plans.best else [],
        rejected=plans.rejected,
        why=plans.why,
    )
    if plans.best:
        print_measured_load(console, plans.best, plans.even_routing)
    if why_not:
        for line in find_objections(plans, why_not).lines:
            console.print(line, soft_wrap=True)
    if plans.best is None:
        raise explain_empty_search(request, plans.search, Path(model))
    write_answer(console, json, plans.best)
    return 0
