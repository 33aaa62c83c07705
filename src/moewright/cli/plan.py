"""`moewright plan`: search the layouts of a job and rank them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype

MAX_TOP = 100  # each is estimated in full


def plan(
    model: str,
    /,
    *,
    on: str = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | None = None,
    load: Path | None = None,
    top: int = 5,
    why_not: str = "",
    json: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Rank the layouts of MODEL on some hardware by predicted step time, with memory and reasons.

    A job's layout keys decide which is picked; the ranking shows what else there is.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml.
    on
        Hardware as count x device, "256xH800" or "2xruns/machine.toml"; a job brings its own.
    seq_len
        Tokens a sequence; 4096 when neither this nor a job says it.
    global_batch
        Sequences a step; 16 a device when neither this nor a job says it.
    precision
        Compute precision; bf16 when neither this nor a job says it.
    load
        Tokens an expert of each layer, measured: a .json list of layers, a .csv with a line of counts a layer (or the
        columns layer,expert,tokens), or the folder of a run. Memory and time are then those of the hottest rank.
    top
        How many layouts to show.
    why_not
        A layout, such as "tp2,ep8,pp4": say what speaks against it.
    json
        Write the best plan (model, workload, hardware, layout, estimate) to this file.
    """
    from moewright.cli.plan_request import (
        Purpose,
        estimate_even_routing,
        explain_empty_search,
        read_plan_request,
        to_job_keys,
        to_options,
        translate_fields,
    )
    from moewright.codec import parse_layout, write_json
    from moewright.report.console import make_console, print_measured_load, print_plans
    from moewright.rules.engine_limits import unsupported_layout
    from moewright.search import explain, search, space, what_if

    if not 1 <= top <= MAX_TOP:
        close = str(min(max(top, 1), MAX_TOP))
        raise BadInput(
            Reason(field="--top", value=str(top), rule=f"must be in 1..{MAX_TOP}", nearest=close)
        )
    asked = read_plan_request(
        model, on=on, seq_len=seq_len, global_batch=global_batch, precision=precision, load=load
    )
    with translate_fields(to_options("--why-not")):
        parse_layout(why_not, world_size=asked.hardware.count)
    runs_here = partial(unsupported_layout, model=asked.model, workload=asked.workload)
    allowed = runs_here if asked.purpose is Purpose.TRAIN else space.no_objections
    with translate_fields(to_job_keys(Path(model))):
        ranked = search.search(
            asked.model,
            asked.workload,
            asked.hardware,
            fixed=asked.layout_text,
            top=top,
            allowed=allowed,
        )
    console = make_console(sys.stdout)
    for line in asked.defaults:
        console.print(line, soft_wrap=True)
    shown = ranked.plans
    if asked.layout_text and ranked.plans:
        free = search.search(
            asked.model, asked.workload, asked.hardware, fixed="", top=top, allowed=allowed
        ).plans
        shown = tuple(ranked.plans[0] if plan == ranked.plans[0] else plan for plan in free)
        shown = shown if ranked.plans[0] in free else (*free, ranked.plans[0])
        console.print(f"layout {asked.layout_text} (given by the job)", soft_wrap=True)
    picked = tuple(
        replace(p, gains=what_if.find_gains(ranked, fixed=asked.layout_text, allowed=allowed))
        for p in ranked.plans[:1]
    )
    shown = tuple(picked[0] if plan is ranked.plans[0] else plan for plan in shown)
    why = (*ranked.why, *explain.explain_bound(picked[0])) if picked else ()
    print_plans(console, shown, picked=picked, rejected=ranked.rejected, why=why)
    for plan in picked:
        print_measured_load(console, plan, estimate_even_routing(plan))
    if why_not:
        for line in explain.explain_objections(
            asked.model, asked.workload, asked.hardware, ranked, why_not
        ):
            console.print(line, soft_wrap=True)
    if not ranked.plans:
        with translate_fields(
            to_job_keys(Path(model)) if asked.purpose is Purpose.TRAIN else to_options("layout")
        ):
            raise explain_empty_search(
                asked.model,
                asked.workload,
                asked.hardware,
                fixed=asked.layout_text,
                allowed=allowed,
                ranked=ranked,
            )
    if json is not None:
        write_json(json, picked[0])
        console.print(f"wrote {json}", soft_wrap=True)
    return 0
