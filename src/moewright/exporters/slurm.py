"""A plan as a Slurm batch script: one torchrun a node.

The nodes meet on the first one of the allocation.
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import (
    comment_lines,
    export_lines,
    join_words,
    transport_lines,
)
from moewright.exporters.run_files import NO_FILES, RunFiles
from moewright.exporters.torchrun import JOB_RESTARTS, RANK_RESTARTS
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
            ' --container-image={} --container-mounts="$PWD:$PWD"{} --container-workdir="$PWD"',
            launch.image,
            Shell.concat(paths),
        )
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
