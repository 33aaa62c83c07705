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

from moewright.codec import PLAN_FILE
from moewright.exporters.launch import LaunchSpec, label_job
from moewright.exporters.megatron.script import (
    all_flags,
    environment_variables,
    export_lines,
    flag_lines,
    join_words,
)
from moewright.exporters.slurm import rendezvous_lines, sbatch_lines, torchrun_words
from moewright.exporters.torchrun import split_into_nodes
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell

OUTPUT_FILE = "output.txt"
EXIT_FILE = "exit_code"
SCRIPT_FILE = "trial.sh"
RUN_FOLDER = "run"  # of our engine, inside the trial's
_OUTPUT_OPTION = "#SBATCH --output="
# What a trial adds to an export: timers of the parts of a step without barriers between them, and
# reports of memory.
_TRIAL_FLAGS = (
    Shell.write("--timing-log-level 1"),
    Shell.write("--timing-log-option minmax"),
    Shell.write("--no-barrier-with-level-1-timing"),
    Shell.write("--log-memory-interval 4"),
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


def render_trial_script(plan: Plan, folder: Path, start: TrialStart) -> Shell:
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
    return Shell.lines(_script_lines(plan, folder.resolve(), start, launch))


def sbatch_options(script: str) -> tuple[str, ...]:
    """Return what the head of a trial's script asks of sbatch, but for where it prints."""
    head = takewhile(lambda line: line.startswith("#"), script.splitlines())
    options = (line for line in head if line.startswith("#SBATCH "))
    return tuple(line for line in options if not line.startswith(_OUTPUT_OPTION))


def render_trial_array(
    scripts: Sequence[Path], options: Sequence[str], folder: Path, at_once: int
) -> Shell:
    """Return the script of a job array whose tasks run a trial each, so many of them at once.

    `scripts` are those of trials that all ask the same `options` of sbatch; task 3 prints to 3.txt
    in the array's folder.
    """
    lines = (
        Shell.write("#!/bin/bash"),
        Shell.write("#SBATCH --output={}", folder.resolve() / "%a.txt"),
        *map(Shell.trust, options),
        Shell.write("#SBATCH --array=0-{}%{}", len(scripts) - 1, at_once),
        Shell.write('case "$SLURM_ARRAY_TASK_ID" in'),
        *(Shell.write("  {}) exec bash {} ;;", task, path) for task, path in enumerate(scripts)),
        Shell.write("esac"),
    )
    return Shell.lines(lines)


def _script_lines(
    plan: Plan, folder: Path, start: TrialStart, launch: LaunchSpec
) -> Iterator[Shell]:
    yield Shell.write("#!/bin/bash")
    if start.is_scheduled:
        # What the user asks for comes last, where sbatch lets it replace what stands before.
        yield from sbatch_lines(launch, output=str(folder / OUTPUT_FILE))
        # A lost trial is submitted anew, which is sooner.
        yield Shell.write("#SBATCH --no-requeue")
        if start.sbatch:
            yield Shell.write("#SBATCH {}", Shell.trust(" ".join(start.sbatch.split())))
    yield Shell.write("set -uo pipefail")
    yield Shell.write("cd {}", folder)
    # A trial that is queued again begins anew.
    yield Shell.write("rm -rf {} {}", RUN_FOLDER, EXIT_FILE)
    if start.setup:
        yield Shell.trust(start.setup)
    yield from export_lines(launch.exported)
    torchrun = Shell.write("torchrun")
    if not start.trainer_script:
        torchrun = Shell.write("{} -m torch.distributed.run", sys.executable)
    starter = Shell.write("{} --standalone --nproc-per-node {}", torchrun, launch.ranks_per_node)
    if start.is_scheduled:
        # Ranks of an earlier trial may still hold the port of another on the same node.
        yield Shell.write(
            'export MASTER_PORT="${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}"'
        )
        yield from rendezvous_lines(launch)
        starter = torchrun_words(launch, torchrun)
    if start.trainer_script:
        yield join_words(
            (
                Shell.write("{} {}", starter, start.trainer_script),
                *flag_lines(all_flags(plan)),
                *_TRIAL_FLAGS,
                *((Shell.trust(start.trainer_flags),) if start.trainer_flags else ()),
            )
        )
    else:
        words = ("-m", "moewright", "train", PLAN_FILE, "--out", RUN_FOLDER)
        yield Shell.write("{} {}", starter, Shell.words(words))
    yield Shell.write("code=$?")
    yield Shell.write('echo "$code" > {}.part && mv {}.part {}', EXIT_FILE, EXIT_FILE, EXIT_FILE)
    yield Shell.write('exit "$code"')
