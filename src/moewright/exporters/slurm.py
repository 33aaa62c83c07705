"""A plan as a Slurm batch script: one torchrun a node.

The nodes meet on the first one of the allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import comment_lines
from moewright.exporters.torchrun import JOB_RESTARTS
from moewright.spec.plan import Plan

_WARNING_S = 120  # before the time limit; moewright's engine saves on SIGTERM


def render_slurm_script(plan: Plan, *, job: str, run_dir: str) -> str:
    """Return a script for sbatch, which adds partition, account and time.

    Raises:
        BadInput: as `build_launch_spec` does.
    """
    launch = build_launch_spec(plan, job=job, run_dir=run_dir)
    lines = [" ".join(map(quote, words)) for words in launch.lines]
    command = " \\\n  ".join((" ".join(torchrun_words(launch)), *lines))
    script = (
        "#!/bin/bash",
        *sbatch_lines(launch, output="%x-%j.log"),
        *_restart_lines(launch),
        *(() if launch.runs_engine else comment_lines(plan)),
        "set -euo pipefail",
        *(f"export {name}={value}" for name, value in launch.exported),
        *rendezvous_lines(launch),
        *_command_lines(launch, command),
    )
    return "\n".join(script) + "\n"


def sbatch_lines(launch: LaunchSpec, *, output: str) -> Iterator[str]:
    """Yield what a launch asks of sbatch: its nodes, one task on each, and its devices."""
    yield f"#SBATCH --job-name={launch.name}"
    yield f"#SBATCH --nodes={launch.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if launch.device.runs_cuda:
        yield f"#SBATCH --gpus-per-node={launch.ranks_per_node}"
    yield "#SBATCH --exclusive"
    yield f"#SBATCH --output={output}"


def _restart_lines(launch: LaunchSpec) -> Iterator[str]:
    if launch.runs_engine:
        yield f"#SBATCH --signal=TERM@{_WARNING_S}"
        yield "#SBATCH --requeue"
        yield "#SBATCH --open-mode=append"


def _command_lines(launch: LaunchSpec, command: str) -> Iterator[str]:
    """Yield the command; a run of the engine is queued again, for it goes on where it was saved.

    That is so at the time limit as well, before which it was told to save.
    """
    if not launch.runs_engine:
        yield command
        return
    yield f"{command} || {{"
    yield "  code=$?"
    yield f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {JOB_RESTARTS} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "  fi"
    yield '  exit "$code"'
    yield "}"


def rendezvous_lines(launch: LaunchSpec) -> Iterator[str]:
    """Yield the line that finds the first node, where several have to meet."""
    if launch.nodes > 1:
        yield 'FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def torchrun_words(launch: LaunchSpec) -> Iterator[str]:
    """Yield the words that start torchrun on every node of an allocation."""
    yield "srun --kill-on-bad-exit=1 torchrun"
    if launch.nodes == 1:
        yield f"--standalone --nproc-per-node {launch.ranks_per_node}"
        return
    yield f"--nnodes {launch.nodes} --nproc-per-node {launch.ranks_per_node}"
    yield '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"'
    yield '--rdzv-endpoint "$FIRST_NODE:${MASTER_PORT:-29500}"'
