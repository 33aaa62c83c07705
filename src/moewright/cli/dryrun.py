"""`moewright dryrun`: become one rank of a job of any size, without data and other ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import JsonOption, SetOption

if TYPE_CHECKING:
    from moewright.spec.hardware import Hardware


def dryrun(job: Path, /, *, rank: int, set_: SetOption = None, json: JsonOption = None) -> int:
    """Count what one rank of a job would hold, send and compute in a step.

    The planner's prediction for the rank stands beside. Every layer, collective and update of the
    rank runs, on tensors without data; routing is even. What the job leaves open of the layout
    takes its default. Exit code 1 when a count that should equal its prediction does not.

    Parameters
    ----------
    job
        The job file; its layout is over train.nproc ranks.
    rank
        The rank to become, from 0.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    json
        Write what was counted to this file.
    """
    from moewright.api.requests import to_job_keys, translate_fields
    from moewright.codec import format_layout, parse_layout, write_json
    from moewright.cost.ledger import predict_rank_ledger
    from moewright.cost.memory import steady_micro_batches
    from moewright.diagnosis.compare_ledgers import compare_ledgers
    from moewright.intake.job import read_job
    from moewright.report.console import make_console
    from moewright.report.dryrun_text import print_dry_run
    from moewright.rules.engine_limits import require_runnable
    from moewright.rules.grid import coordinate, with_fabric_nodes
    from moewright.rules.job import Job
    from moewright.rules.micro_batches import micro_batches
    from moewright.rules.routing import round_robin_selection
    from moewright.search.search import build_plan

    job_file = read_job(job, tuple(set_ or ()))
    model = job_file.model
    to_keys = to_job_keys(job)
    with translate_fields(lambda field: "--rank" if field == "rank" else to_keys(field)):
        hardware = _read_hardware(job_file.hardware, job_file.nproc)
        layout = parse_layout(job_file.layout_text, world_size=job_file.nproc)
        if hardware is not None:
            layout = with_fabric_nodes(layout, hardware.fabric.domain_size)
        require_runnable(Job(model=model, workload=job_file.workload, layout=layout))
        coordinate(layout, rank, "pp")  # refuses a rank outside of the world

        # torch takes seconds, so it comes after what is refused without it.
        from moewright.engine.run.dry_run import dry_run

        step_micro_batches = micro_batches(job_file.workload, layout)
        run_micro_batches = steady_micro_batches(layout, step_micro_batches)
        # Sequences without data have no documents.
        data = replace(job_file.workload.data, attended_share=1.0)
        global_batch = run_micro_batches * layout.mbs * layout.dp
        workload = replace(job_file.workload, global_batch=global_batch, data=data)
        counted = dry_run(Job(model=model, workload=workload, layout=layout), rank=rank)
    pp_rank = counted.ledger.pp_rank
    selection = round_robin_selection(Job(model=model, workload=workload, layout=layout))
    predicted = predict_rank_ledger(model, workload, layout, rank=rank, selection=selection)
    comparison = compare_ledgers(predicted, counted.ledger)
    planned = None
    if hardware is not None:
        plan = build_plan(model, job_file.workload, hardware, layout)
        planned = plan.estimate.ledgers[pp_rank]
    console = make_console(sys.stdout)
    console.print(
        f"{model.name or 'model'}, rank {rank} of {job_file.nproc} (pipeline rank {pp_rank})",
        soft_wrap=True,
    )
    console.print(f"layout    {format_layout(layout)}", soft_wrap=True)
    console.print(
        f"{run_micro_batches} of the step's {step_micro_batches} micro-batches: the peak does not "
        "grow after; the rest of the table is of these",
        soft_wrap=True,
    )
    print_dry_run(
        console,
        comparison,
        states_bytes=counted.states_bytes,
        tensor_bytes=counted.peak_by_module,
        planned=planned,
    )
    if json is not None:
        write_json(json, counted)
        console.print(f"wrote {json}", soft_wrap=True)
    return 0 if comparison.is_exact and comparison.is_within_bound else 1


def _read_hardware(name: str, nproc: int) -> Hardware | None:
    """Return the hardware of a job; None for a machine file that is not measured yet."""
    from moewright.intake import catalogue

    is_file = Path(name).suffix == ".toml"
    if is_file and not Path(name).exists():
        return None
    return catalogue.hardware(f"{nproc}x{name}")
