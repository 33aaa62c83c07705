"""A plan as a Slurm batch script: one torchrun a node.

The nodes meet on the first one of the allocation.
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import comment_lines, export_lines, join_words
from moewright.exporters.torchrun import JOB_RESTARTS
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell

_TORCHRUN = Shell.write("torchrun")
_WARNING_S = 120  # before the time limit; moewright's engine saves on SIGTERM


def render_slurm_script(plan: Plan, *, job: str, run_dir: str) -> Shell:
    """Return a script for sbatch, which adds partition, account and time.

    Raises:
        BadInput: as `build_launch_spec` does.
    """
    launch = build_launch_spec(plan, job=job, run_dir=run_dir)
    command = join_words((torchrun_words(launch), *map(Shell.words, launch.lines)))
    script = (
        Shell.write("#!/bin/bash"),
        *sbatch_lines(launch, output="%x-%j.log"),
        *_restart_lines(launch),
        *(() if launch.runs_engine else comment_lines(plan, Shell)),
        Shell.write("set -euo pipefail"),
        *export_lines(launch.exported),
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
        yield Shell.write("#SBATCH --requeue")
        yield Shell.write("#SBATCH --open-mode=append")


def _command_lines(launch: LaunchSpec, command: Shell) -> Iterator[Shell]:
    """Yield the command; a run of the engine is queued again, for it goes on where it was saved.

    That is so at the time limit as well, before which it was told to save.
    """
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


def rendezvous_lines(launch: LaunchSpec) -> Iterator[Shell]:
    """Yield the line that finds the first node, where several have to meet."""
    if launch.nodes > 1:
        yield Shell.write('FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')


def torchrun_words(launch: LaunchSpec, torchrun: Shell = _TORCHRUN) -> Shell:
    """Return the words that start torchrun on every node of an allocation."""
    ranks = launch.ranks_per_node
    start = Shell.write("srun --kill-on-bad-exit=1 {}", torchrun)
    if launch.nodes == 1:
        return Shell.write("{} --standalone --nproc-per-node {}", start, ranks)
    return Shell.write(
        '{} --nnodes {} --nproc-per-node {} --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" '
        '--rdzv-endpoint "$FIRST_NODE:${{MASTER_PORT:-29500}}"',
        start,
        launch.nodes,
        ranks,
    )
