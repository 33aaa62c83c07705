"""A plan as a Slurm batch script: one torchrun a node, which meet on the first node of the
allocation."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import comment_lines
from moewright.spec.plan import Plan

_WARNING_S = 120  # before the time limit; our engine saves on SIGTERM


def render_slurm_script(plan: Plan, *, job: str, run_dir: str) -> str:
    """For sbatch, which adds partition, account and time. Raises BadInput as `start_of` does."""
    start = build_launch_spec(plan, job=job, run_dir=run_dir)
    lines = [" ".join(map(quote, words)) for words in start.lines]
    command = " \\\n  ".join((" ".join(_torchrun(start)), *lines))
    exports = (f"export {name}={value}" for name, value in start.exported)
    said = comment_lines(plan) if not start.runs_engine else iter(())
    return (
        "\n".join(
            (
                "#!/bin/bash",
                *_header(start),
                *said,
                "set -euo pipefail",
                *exports,
                *_meet(start),
                command,
            )
        )
        + "\n"
    )


def _header(start: LaunchSpec) -> Iterator[str]:
    yield f"#SBATCH --job-name={start.name}"
    yield f"#SBATCH --nodes={start.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if start.uses_gpus:
        yield f"#SBATCH --gpus-per-node={start.ranks_per_node}"
    yield "#SBATCH --exclusive"
    yield "#SBATCH --output=%x-%j.log"
    if start.runs_engine:
        yield f"#SBATCH --signal=TERM@{_WARNING_S}"


def _meet(start: LaunchSpec) -> Iterator[str]:
    if start.nodes > 1:
        yield 'FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def _torchrun(start: LaunchSpec) -> Iterator[str]:
    yield "srun --kill-on-bad-exit=1 torchrun"
    if start.nodes == 1:
        yield f"--standalone --nproc-per-node {start.ranks_per_node}"
        return
    yield f"--nnodes {start.nodes} --nproc-per-node {start.ranks_per_node}"
    yield '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$FIRST_NODE:${MASTER_PORT:-29500}"'
