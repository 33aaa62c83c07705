"""A trial of a plan as a shell script: for this machine, or for sbatch with its own options.

The script leaves its exit code in a file as the last thing it does, so that a trial that was lost
with its node or its scheduler is told from one that ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote

from moewright.codec import PLAN_FILE
from moewright.exporters.launch import LaunchSpec, label_job
from moewright.exporters.megatron.script import (
    all_flags,
    environment_variables,
    flag_lines,
)
from moewright.exporters.slurm import rendezvous_lines, sbatch_lines, torchrun_words
from moewright.exporters.torchrun import split_into_nodes
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan

OUTPUT_FILE = "output.txt"
EXIT_FILE = "exit_code"
SCRIPT_FILE = "trial.sh"
RUN_FOLDER = "run"  # of our engine, inside the trial's
_OUTPUT_OPTION = "#SBATCH --output="
# What a trial adds to an export: timers of the parts of a step without barriers between them, and
# reports of memory.
_TRIAL_FLAGS = (
    "--timing-log-level 1",
    "--timing-log-option minmax",
    "--no-barrier-with-level-1-timing",
    "--log-memory-interval 4",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStart:
    """How trials are started.

    `trainer_script` is the path of pretrain_gpt.py, "" for our engine, and `trainer_flags` are
    added to those of the plan. `setup` are lines of shell that run before each trial, and `sbatch`
    options of sbatch; `is_scheduled` says that Slurm runs the script.
    """

    trainer_script: str = ""
    trainer_flags: str = ""
    setup: str = ""
    sbatch: str = ""
    is_scheduled: bool = False


def render_trial_script(plan: Plan, folder: Path, start: TrialStart) -> str:
    """Return the script that runs a plan's trial in a folder.

    Raises:
        BadInput: Megatron-LM cannot say the plan, the ranks do not fill whole nodes, or they do not
            fit on this machine where no scheduler runs the script.
    """
    nodes, ranks_per_node = split_into_nodes(plan)
    if nodes > 1 and not start.is_scheduled:
        rule = f"starts ranks only on this machine; {nodes} nodes are needed"
        raise BadInput(Reason(field="--launcher", rule=rule, nearest="slurm"))
    if start.trainer_script and (reasons := megatron_refusals(plan_job(plan), plan.hardware)):
        raise BadInput(*reasons)
    launch = LaunchSpec(
        name=f"{label_job(plan.model.name)}-trial",
        lines=(),
        exported=environment_variables(plan.layout) if start.trainer_script else (),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=plan.hardware.device.kind,
        runs_engine=False,
    )
    return "\n".join(_script_lines(plan, folder.resolve(), start, launch)) + "\n"


def sbatch_options(script: str) -> tuple[str, ...]:
    """Return what the head of a trial's script asks of sbatch, but for where it prints."""
    head = takewhile(lambda line: line.startswith("#"), script.splitlines())
    options = (line for line in head if line.startswith("#SBATCH "))
    return tuple(line for line in options if not line.startswith(_OUTPUT_OPTION))


def render_trial_array(
    scripts: Sequence[Path], options: Sequence[str], folder: Path, at_once: int
) -> str:
    """Return the script of a job array whose tasks run a trial each, so many of them at once.

    `scripts` are those of trials that all ask the same `options` of sbatch; task 3 prints to 3.txt
    in the array's folder.
    """
    lines = (
        "#!/bin/bash",
        f"{_OUTPUT_OPTION}{folder.resolve()}/%a.txt",
        *options,
        f"#SBATCH --array=0-{len(scripts) - 1}%{at_once}",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(f"  {task}) exec bash {quote(str(path))} ;;" for task, path in enumerate(scripts)),
        "esac",
    )
    return "\n".join(lines) + "\n"


def _script_lines(plan: Plan, folder: Path, start: TrialStart, launch: LaunchSpec) -> Iterator[str]:
    yield "#!/bin/bash"
    if start.is_scheduled:
        # What the user asks for comes last, where sbatch lets it replace what stands before.
        yield from sbatch_lines(launch, output=str(folder / OUTPUT_FILE))
        yield "#SBATCH --no-requeue"  # a lost trial is submitted anew, which is sooner
        if start.sbatch:
            yield f"#SBATCH {' '.join(start.sbatch.split())}"
    yield "set -uo pipefail"
    yield f"cd {quote(str(folder))}"
    # A trial that is queued again begins anew.
    yield f"rm -rf {RUN_FOLDER} {EXIT_FILE}"
    if start.setup:
        yield start.setup
    for name, value in launch.exported:
        yield f"export {name}={value}"
    starter = f"torchrun --standalone --nproc-per-node {launch.ranks_per_node}"
    if start.is_scheduled:
        # Ranks of an earlier trial may still hold the port of another on the same node.
        yield 'export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"'
        yield from rendezvous_lines(launch)
        starter = " ".join(torchrun_words(launch))
    if start.trainer_script:
        command = " \\\n  ".join(
            (
                f"{starter} {quote(start.trainer_script)}",
                *flag_lines(all_flags(plan)),
                *_TRIAL_FLAGS,
                *((start.trainer_flags,) if start.trainer_flags else ()),
            )
        )
    else:
        engine = f"{quote(sys.executable)} -m torch.distributed.run"
        words = ("-m", "moewright", "train", PLAN_FILE, "--out", RUN_FOLDER)
        command = f"{starter.replace('torchrun', engine, 1)} {' '.join(words)}"
    yield command
    yield "code=$?"
    yield f'echo "$code" > {EXIT_FILE}.part && mv {EXIT_FILE}.part {EXIT_FILE}'
    yield 'exit "$code"'
