"""`moewright estimate`: one layout's memory, time and verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype


def estimate(
    model: str = "",
    /,
    *,
    on: str = "",
    layout: str = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | None = None,
    load: Path | None = None,
    from_flags: Path | None = None,
    script_args: str = "",
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    trace: Path | None = None,
) -> int:
    """Predict memory by component and module, time by component, and whether one layout fits.

    With --from-flags, also what would be better.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml. A launch script
        that gives the model's sizes needs none.
    on
        Hardware as count x device, "256xH800" or "2xruns/machine.toml"; a job brings its own, and a launch script
        the count.
    layout
        The layout, such as "tp2,ep8,pp32,vpp3,mbs1,recompute=select"; dp is derived. A job brings its own.
    seq_len
        Tokens a sequence; 4096 when neither this nor a job says it.
    global_batch
        Sequences a step; 16 a device when neither this nor a job says it.
    precision
        Compute precision; bf16 when neither this nor a job says it.
    load
        Tokens an expert of each layer, measured: a .json list of layers, a .csv with a line of counts a layer (or the
        columns layer,expert,tokens), or the folder of a run. Memory and time are then those of the hottest rank.
    from_flags
        A launch script of Megatron-LM: it says layout, batches and precision. Variables that it does not set are taken
        from the environment.
    script_args
        What stands behind the script's name, in quotes: "dlc A22B 1 2048".
    json
        Write the plan of this layout (model, workload, hardware, layout, estimate) to this file.
    trace
        Write the predicted pipeline timetable to this file, a Chrome trace that Perfetto opens.
    """
    from moewright.cli.launch_script import print_better_layouts, read_plan_from_script
    from moewright.cli.plan_request import (
        estimate_even_routing,
        read_plan_request,
        to_job_keys,
        to_options,
        translate_fields,
    )
    from moewright.codec import parse_layout, write_json
    from moewright.report.console import make_console, print_estimate, print_measured_load
    from moewright.report.trace import write_trace
    from moewright.search.search import build_plan

    if from_flags is not None:
        said = {
            "--layout": layout,
            "--seq-len": seq_len,
            "--global-batch": global_batch,
            "--precision": precision,
            "--load": load,
        }
        beside = next((name for name, value in said.items() if value), "")
        if beside:
            raise BadInput(
                Reason(
                    field=beside, rule="the script of --from-flags says it", nearest="leave it out"
                )
            )
        result, found = read_plan_from_script(from_flags, arguments=script_args, model=model, on=on)
        chosen_lines = found.notes
    else:
        asked = read_plan_request(
            model, on=on, seq_len=seq_len, global_batch=global_batch, precision=precision, load=load
        )
        with translate_fields(
            to_options("--layout") if layout or not asked.layout_text else to_job_keys(Path(model))
        ):
            chosen = parse_layout(layout or asked.layout_text, world_size=asked.hardware.count)
            result = build_plan(asked.model, asked.workload, asked.hardware, chosen)
        chosen_lines = asked.defaults
    console = make_console(sys.stdout)
    for line in chosen_lines:
        console.print(line, soft_wrap=True)
    print_estimate(console, result)
    print_measured_load(console, result, estimate_even_routing(result))
    if from_flags is not None:
        print_better_layouts(console, result)
    if json is not None:
        write_json(json, result)
        console.print(f"wrote {json}", soft_wrap=True)
    if trace is not None:
        write_trace(result, trace)
        console.print(f"wrote {trace}", soft_wrap=True)
    return 0
