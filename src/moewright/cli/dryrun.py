"""`moewright dryrun`: become one rank of a job of any size in this process, without data and
without the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def dryrun(
    job: Path,
    /,
    *,
    rank: int,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Count what one rank of a job would hold, send and compute in a step, beside what the planner
    predicts for it.

    Every layer, collective and update of the rank runs, on tensors without data; routing is even.
    What the job leaves open of the layout takes its default. Exit code 1 when a count that should
    equal its prediction does not.

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
    from moewright.cli.plan_request import to_job_keys, translate_fields
    from moewright.codec import format_layout, parse_layout, write_json
    from moewright.cost.ledger import predict_rank_ledger
    from moewright.cost.memory import steady_micro_batches
    from moewright.diagnosis.compare_ledgers import compare_ledgers
    from moewright.intake import catalogue
    from moewright.intake.job import read_job
    from moewright.report.console import make_console
    from moewright.report.dryrun_text import print_dry_run
    from moewright.rules.engine_limits import require_runnable
    from moewright.rules.grid import coordinate, with_fabric_nodes
    from moewright.rules.legality import micro_batches
    from moewright.rules.routing import round_robin_selection
    from moewright.search.search import build_plan

    asked = read_job(job, tuple(set_ or ()))
    with translate_fields(lambda field: "--rank" if field == "rank" else to_job_keys(job)(field)):
        device = (
            catalogue.hardware(f"{asked.nproc}x{asked.hardware}")
            if _is_known(asked.hardware)
            else None
        )
        layout = parse_layout(asked.layout_text, world_size=asked.nproc)
        if device is not None:
            layout = with_fabric_nodes(layout, device.fabric.domain_size)
        require_runnable(asked.model, asked.workload, layout)
        coordinate(layout, rank, "pp")  # refuses a rank outside of the world

        from moewright.engine.run.dry_run import (
            dry_run,
        )  # torch takes seconds: after what is refused without it

        count = micro_batches(asked.workload, layout)
        run = steady_micro_batches(layout, count)
        whole = replace(
            asked.workload.data, attended_share=1.0
        )  # sequences without data have no documents
        workload = replace(asked.workload, global_batch=run * layout.mbs * layout.dp, data=whole)
        found = dry_run(asked.model, workload, layout, rank=rank)
    selection = round_robin_selection(asked.model, workload, layout, micro_batches=run)
    comparison = compare_ledgers(
        predict_rank_ledger(asked.model, workload, layout, rank=rank, selection=selection),
        found.ledger,
    )
    planned = None
    if device is not None:
        planned = build_plan(asked.model, asked.workload, device, layout).estimate.ledgers[
            found.ledger.pp_rank
        ]
    console = make_console(sys.stdout)
    name = asked.model.name or "model"
    console.print(
        f"{name}, rank {rank} of {asked.nproc} (pipeline rank {found.ledger.pp_rank})",
        soft_wrap=True,
    )
    console.print(f"layout    {format_layout(layout)}", soft_wrap=True)
    console.print(
        f"{run} of the step's {count} micro-batches: the peak does not grow after; the rest of the table is of these",
        soft_wrap=True,
    )
    print_dry_run(
        console,
        comparison,
        states_bytes=found.states_bytes,
        tensor_bytes=found.peak_by_module,
        planned=planned,
    )
    if json is not None:
        write_json(json, found)
        console.print(f"wrote {json}", soft_wrap=True)
    return 0 if comparison.is_exact and comparison.is_within_bound else 1


def _is_known(hardware: str) -> bool:
    """A device of the catalogue, or a file that is there; a machine not measured yet has no plan to
    compare with."""
    return Path(hardware).suffix != ".toml" or Path(hardware).exists()
