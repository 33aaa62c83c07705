"""Batch scripts: a plan for Slurm, and a trial of a plan for this machine or for sbatch.

A plan as a Slurm batch script: one torchrun a node. The nodes meet on the first one of the
allocation.

A trial of a plan as a shell script: for this machine, or for sbatch with its own options. The
script leaves its exit code in a file as the last thing it does, so that a trial that was lost with
its node or its scheduler is told from one that ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from moewright.codec import PLAN_FILE
from moewright.exporters.launch import LaunchSpec, build_launch_spec, label_job
from moewright.exporters.megatron.script import (
    all_flags,
    comment_lines,
    environment_variables,
    export_lines,
    flag_lines,
    join_words,
    transport_lines,
)
from moewright.exporters.torchrun import (
    JOB_RESTARTS,
    NO_FILES,
    RANK_RESTARTS,
    RunFiles,
    split_into_nodes,
)
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell

_TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM: the step that was saved last
_TORCHRUN = Shell.write("torchrun")
_WARNING_S = 120  # before the time limit; moewright's engine saves on SIGTERM
_LEAVING_MINUTES = 10  # before the time limit, in which Megatron-LM saves and ends
_FAR_FUTURE = 4102444800  # seconds since 1970: a job without a time limit never leaves


def render_slurm_script(
    plan: Plan, *, job: str, run_dir: str, image: str = "", files: RunFiles = NO_FILES
) -> Shell:
    """Return a script for sbatch, which adds partition, account and time.

    An `image` is started by Pyxis. A run that saves is queued again until its last step is saved.

    Raises:
        BadInput: as `build_launch_spec` does.
    """
    launch = build_launch_spec(plan, job=job, run_dir=run_dir, image=image, files=files)
    words = map(Shell.words, launch.lines)
    leaving = (Shell.write('--exit-duration-in-mins "$MINUTES"'),) if launch.save else ()
    command = join_words((torchrun_words(launch), *words, *leaving))
    script = (
        Shell.write("#!/bin/bash"),
        *sbatch_lines(launch, output="%x-%j.log"),
        *_restart_lines(launch),
        *(() if launch.runs_engine else comment_lines(plan, Shell, files)),
        Shell.write("set -euo pipefail"),
        *export_lines(launch.exported),
        *transport_lines(launch.transport),
        *_health_lines(launch),
        *rendezvous_lines(launch),
        *_command_lines(launch, command),
    )
    return Shell.lines(script)


def sbatch_lines(launch: LaunchSpec, *, output: str) -> Iterator[Shell]:
    """Yield what a launch asks of sbatch: its nodes, one task on each, and its devices."""
    yield Shell.write("#SBATCH --job-name={}", launch.name)
    yield Shell.write("#SBATCH --nodes={}", launch.nodes)
    yield Shell.write("#SBATCH --ntasks-per-node=1")
    if launch.device.runs_cuda:
        yield Shell.write("#SBATCH --gpus-per-node={}", launch.ranks_per_node)
    yield Shell.write("#SBATCH --exclusive")
    yield Shell.write("#SBATCH --output={}", output)


def _restart_lines(launch: LaunchSpec) -> Iterator[Shell]:
    if launch.runs_engine:
        yield Shell.write("#SBATCH --signal=TERM@{}", _WARNING_S)
    # What saves nothing would begin at its first step again.
    if launch.runs_engine or launch.save:
        yield Shell.write("#SBATCH --requeue")
        yield Shell.write("#SBATCH --open-mode=append")


def _health_lines(launch: LaunchSpec) -> Iterator[Shell]:
    """Yield a check that every node has all its GPUs, which fails in seconds and names the node."""
    if launch.device is DeviceKind.CUDA and not launch.runs_engine:
        yield Shell.comment("A node that lost a GPU is named here, before anything is loaded.")
        yield Shell.comment("shellcheck disable=SC2016  # the node expands it")
        check = Shell.write(
            '[ "$(nvidia-smi -L | grep -c ^GPU)" -ge {} ] || '
            '{{ echo "$(hostname): a GPU is missing"; exit 1; }}',
            launch.ranks_per_node,
        )
        yield Shell.write("srun bash -c {}", str(check))


def _command_lines(launch: LaunchSpec, command: Shell) -> Iterator[Shell]:
    """Yield the command; a run of the engine is queued again, for it goes on where it was saved.

    That is so at the time limit as well, before which it was told to save.
    """
    if launch.save:
        yield from _saved_run_lines(launch, command)
        return
    if not launch.runs_engine:
        yield command
        return
    yield Shell.write("{} || {{", command)
    yield Shell.write("  code=$?")
    yield Shell.write('  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {} ]; then', JOB_RESTARTS)
    yield Shell.write('    scontrol requeue "$SLURM_JOB_ID"')
    yield Shell.write("  fi")
    yield Shell.write('  exit "$code"')
    yield Shell.write("}}")


def _saved_run_lines(launch: LaunchSpec, command: Shell) -> Iterator[Shell]:
    """Yield a run of Megatron-LM that goes on in the next job until its last step is saved."""
    yield Shell.comment(
        "Megatron-LM saves and ends {} minutes before the job's time is up.", _LEAVING_MINUTES
    )
    yield Shell.write(
        "MINUTES=$(( (${{SLURM_JOB_END_TIME:-{}}} - $(date +%s)) / 60 - {} ))",
        _FAR_FUTURE,
        _LEAVING_MINUTES,
    )
    yield Shell.write("mkdir -p {}", launch.save)
    yield Shell.write("code=0")
    yield Shell.write("{} || code=$?", command)
    tracker = f"{launch.save}/{_TRACKER}"
    # Before the first save there is no such file.
    yield Shell.write("saved=$(cat {} 2>/dev/null || echo 0)", tracker)
    yield Shell.write(
        'if [ "$saved" != {} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {} ]; then',
        launch.steps,
        JOB_RESTARTS,
    )
    yield Shell.write('  scontrol requeue "$SLURM_JOB_ID"')
    yield Shell.write("fi")
    yield Shell.write('exit "$code"')


def rendezvous_lines(launch: LaunchSpec) -> Iterator[Shell]:
    """Yield the line that finds the first node, where several have to meet."""
    if launch.nodes > 1:
        yield Shell.write('FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')


def torchrun_words(launch: LaunchSpec, torchrun: Shell = _TORCHRUN) -> Shell:
    """Return the words that start torchrun on every node of an allocation."""
    ranks = launch.ranks_per_node
    container = Shell.write("")
    if launch.image:
        paths = (Shell.write(",{}:{}", path, path) for _, path in launch.folders)
        container = Shell.write(
            # Relative paths lead to the same files inside.
            ' --container-image={} --container-mounts="$PWD:$PWD"{} --container-workdir="$PWD"',
            launch.image,
            Shell.concat(paths),
        )
    # Other nodes would wait for one that has failed.
    start = Shell.write("srun --kill-on-bad-exit=1{} {}", container, torchrun)
    if launch.save:
        start = Shell.write("{} --max-restarts {}", start, RANK_RESTARTS)
    if launch.nodes == 1:
        return Shell.write("{} --standalone --nproc-per-node {}", start, ranks)
    return Shell.write(
        '{} --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" '
        '--rdzv-endpoint "$FIRST_NODE:${{MASTER_PORT:-29500}}"',
        start,
        launch.nodes,
        ranks,
    )


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
        # From scripts of trials, where they were quoted.
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
    # Without -e: a failure is followed by the line that writes its code.
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
    # Moved into place: a reader finds a whole file or none.
    yield Shell.write('echo "$code" > {}.part && mv {}.part {}', EXIT_FILE, EXIT_FILE, EXIT_FILE)
    yield Shell.write('exit "$code"')
