"""The program that a launch file starts on every node: Megatron-LM, or moewright's own engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moewright.exporters.megatron.script import TRAINER, environment_variables, megatron_flags
from moewright.exporters.torchrun import engine_words, split_into_nodes
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan

_LONGEST_NAME = 40  # Kubernetes appends suffixes of its own and stops at 63


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """What is started, and where.

    `lines` are the words behind torchrun, one group a line; `exported` are variables that are set
    before.
    """

    name: str
    lines: tuple[tuple[str, ...], ...]
    exported: tuple[tuple[str, str], ...]
    nodes: int
    ranks_per_node: int
    device: DeviceKind
    runs_engine: bool


def build_launch_spec(plan: Plan, *, job: str, run_dir: str) -> LaunchSpec:
    """Build the launch of moewright's engine where a job file is given, else of Megatron-LM.

    Raises:
        BadInput: Megatron-LM cannot say the plan, or the ranks do not fill whole nodes.
    """
    nodes, ranks_per_node = split_into_nodes(plan)
    lines: tuple[tuple[str, ...], ...]
    if job:
        lines = (engine_words(job, run_dir),)
    else:
        lines = ((TRAINER,), *megatron_flags(plan))
    return LaunchSpec(
        name=label_job(plan.model.name),
        lines=lines,
        exported=() if job else environment_variables(plan.layout),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=plan.hardware.device.kind,
        runs_engine=bool(job),
    )


def label_job(name: str) -> str:
    """Return a model's name as schedulers take it: small letters, digits and dashes."""
    short_name = name.rpartition("/")[2].casefold()
    label = re.sub(r"[^a-z0-9]+", "-", short_name).strip("-")[:_LONGEST_NAME].strip("-")
    if label[:1].isalpha():
        return label
    return f"job-{label}".strip("-")
