"""The program that a launch file starts on every node: Megatron-LM, or moewright's own engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from moewright.codec.data_paths import parse_data_paths
from moewright.exporters.megatron.layout import training_steps
from moewright.exporters.megatron.script import TRAINER, environment_variables, megatron_flags
from moewright.exporters.torchrun import (
    NO_FILES,
    RunFiles,
    TransportSetting,
    engine_words,
    split_into_nodes,
    transport_settings,
)
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload

_LONGEST_NAME = 40  # Kubernetes appends suffixes of its own and stops at 63


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """What is started, and where.

    `lines` are the words behind torchrun, one group a line; `exported` are variables that are set
    before, `transport` those of the network's libraries. `image` is the container's. `save` is the
    folder of Megatron-LM's checkpoints, "" where it saves none, and `steps` are those to train.
    `folders` are the absolute ones that it reads and writes, each with a name for a volume.
    """

    name: str
    lines: tuple[tuple[str, ...], ...]
    exported: tuple[tuple[str, str], ...]
    nodes: int
    ranks_per_node: int
    device: DeviceKind
    runs_engine: bool
    transport: tuple[TransportSetting, ...] = ()
    image: str = ""
    save: str = ""
    steps: int = 0
    folders: tuple[tuple[str, str], ...] = ()


def build_launch_spec(
    plan: Plan, *, job: str, run_dir: str, image: str = "", files: RunFiles = NO_FILES
) -> LaunchSpec:
    """Build the launch of moewright's engine where a job file is given, else of Megatron-LM.

    Raises:
        BadInput: Megatron-LM cannot say the plan, or the ranks do not fill whole nodes.
    """
    nodes, ranks_per_node = split_into_nodes(plan)
    lines: tuple[tuple[str, ...], ...]
    if job:
        lines = (engine_words(job, run_dir),)
    else:
        lines = ((TRAINER,), *megatron_flags(plan, files))
    save = ""
    # Our engine saves in its run folder.
    if not job and plan.workload.checkpoint.every_steps:
        save = files.save
    return LaunchSpec(
        name=label_job(plan.model.name),
        lines=lines,
        exported=() if job else environment_variables(plan.layout),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=plan.hardware.device.kind,
        runs_engine=bool(job),
        transport=tuple(transport_settings(plan.layout, plan.hardware)),
        image=image,
        save=save,
        steps=training_steps(plan.workload),
        folders=() if job else tuple(_list_folders(plan.workload, save)),
    )


def _list_folders(workload: Workload, save: str) -> Iterator[tuple[str, str]]:
    """Yield the absolute folders of a run of Megatron-LM, each once."""
    if save.startswith("/"):
        yield "run", save
    corpora = [
        part.path
        for text in (workload.data.train, workload.data.heldout)
        for part in parse_data_paths(text)
        if part.path.startswith("/")
    ]
    # A corpus is named by what its two files' names begin with.
    parents = dict.fromkeys(str(PurePosixPath(path).parent) for path in corpora)
    for number, parent in enumerate(parents, 1):
        yield ("data" if number == 1 else f"data-{number}"), parent


def label_job(name: str) -> str:
    """Return a model's name as schedulers take it: small letters, digits and dashes."""
    short_name = name.rpartition("/")[2].casefold()
    label = re.sub(r"[^a-z0-9]+", "-", short_name).strip("-")[:_LONGEST_NAME].strip("-")
    # Kubernetes' names begin with a letter.
    if label[:1].isalpha():
        return label
    return f"job-{label}".strip("-")
