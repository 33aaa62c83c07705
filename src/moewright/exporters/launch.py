"""What a launch file starts on every node: Megatron-LM with the plan's flags, or our own engine on
the plan's job."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moewright.exporters.megatron.script import TRAINER, environment_variables, megatron_flags
from moewright.exporters.torchrun import split_into_nodes
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan

_LONGEST_NAME = 40  # Kubernetes puts suffixes of its own behind it and stops at 63


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """The words behind torchrun, one group a line; what is exported before; nodes, ranks of each,
    whether on GPUs."""

    name: str
    lines: tuple[tuple[str, ...], ...]
    exported: tuple[tuple[str, str], ...]
    nodes: int
    ranks_per_node: int
    uses_gpus: bool
    runs_engine: bool


def build_launch_spec(plan: Plan, *, job: str, run_dir: str) -> LaunchSpec:
    """Our engine when a job file is given, else Megatron-LM. Raises BadInput for what Megatron-LM
    cannot say, and when the ranks do not fill whole nodes.
    """
    nodes, ranks = split_into_nodes(plan)
    if job:
        lines: tuple[tuple[str, ...], ...] = (
            ("--no-python", "moewright", "train", job, "--out", run_dir),
        )
    else:
        lines = ((TRAINER,), *megatron_flags(plan))
    return LaunchSpec(
        name=_label(plan.model.name),
        lines=lines,
        exported=() if job else environment_variables(plan.layout),
        nodes=nodes,
        ranks_per_node=ranks,
        uses_gpus=plan.hardware.device.kind is DeviceKind.CUDA,
        runs_engine=bool(job),
    )


def _label(name: str) -> str:
    """A model's name as schedulers take it: small letters, digits and dashes."""
    short = (
        re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].casefold())
        .strip("-")[:_LONGEST_NAME]
        .strip("-")
    )
    return short if short[:1].isalpha() else f"job-{short}".strip("-")
