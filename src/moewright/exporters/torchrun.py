"""How a plan's processes are started: torchrun's command, variables, and the files of the run.

Variables of the libraries that move bytes, each with the reason why a launch file sets it. The
table is data/transport.toml, a source in each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from moewright.codec import from_data
from moewright.codec.files import parse_toml
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell

_TABLE = "data/transport.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSetting:
    """A variable of the environment, and where it is needed; empty tuples are everywhere."""

    name: str
    value: str
    reason: str
    source: str
    networks: tuple[str, ...] = ()
    dispatchers: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    def is_for(self, layout: Layout, hardware: Hardware) -> bool:
        """Whether a layout on some hardware needs it."""
        fabric = hardware.fabric
        crosses = layout.world_size > fabric.domain_size
        return (
            (not self.networks or (crosses and fabric.network in self.networks))
            and (not self.dispatchers or (layout.ep > 1 and layout.dispatcher in self.dispatchers))
            and (not self.domains or fabric.domain in self.domains)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TransportSettings:
    setting: tuple[TransportSetting, ...]


@cache
def _read_table() -> tuple[TransportSetting, ...]:
    text = resources.files("moewright.exporters").joinpath(_TABLE).read_text(encoding="utf-8")
    return from_data(_TransportSettings, parse_toml(text, where=_TABLE), where=_TABLE).setting


def transport_settings(layout: Layout, hardware: Hardware) -> Iterator[TransportSetting]:
    """Yield the settings of a layout's ranks; a CPU and ROCm, whose RCCL has others, have none."""
    if hardware.device.kind is not DeviceKind.CUDA or layout.world_size == 1:
        return
    size = hardware.fabric.domain_size
    for setting in _read_table():
        if setting.is_for(layout, hardware):
            value = setting.value.format(
                domain_ranks=min(layout.ep * layout.etp, size), domain_size=size
            )
            yield replace(setting, value=value)


SAVE_FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Paths and names of a run; "" where a launch file does without.

    `save` is the folder of its checkpoints, from which it also goes on, `weights` a checkpoint of
    the trainer that it starts from; `tokenizer` is a name or a folder of Hugging Face, `tracker` a
    project of Weights & Biases. `remarks` are said on top of the file.
    """

    save: str = SAVE_FOLDER
    weights: str = ""
    tokenizer: str = ""
    tracker: str = ""
    remarks: tuple[str, ...] = ()


NO_FILES = RunFiles()


# How often torchrun's agent starts the ranks again, and a cluster the whole job.
RANK_RESTARTS = 3
JOB_RESTARTS = 10


def render_engine_command(plan: Plan, *, job: str, run_dir: str) -> Shell:
    """Return the line that starts moewright's engine on every node.

    It trains the job in the run folder that holds the plan.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    return Shell.write("{} {}", torchrun_command(plan), Shell.words(engine_words(job, run_dir)))


def engine_words(job: str, run_dir: str) -> tuple[str, ...]:
    """Return the words behind torchrun that start the engine, again where ranks fail."""
    restarts = ("--max-restarts", str(RANK_RESTARTS))
    engine = ("moewright", "train", job, "--out", run_dir, "--supervise")
    return (*restarts, "--no-python", *engine)


def torchrun_command(plan: Plan) -> Shell:
    """Return torchrun with its nodes and ranks.

    Several nodes meet at $MASTER_ADDR and are numbered by $NODE_RANK.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    nodes, ranks_per_node = split_into_nodes(plan)
    if nodes == 1:
        return Shell.write("torchrun --standalone --nproc-per-node {}", ranks_per_node)
    return Shell.write(
        'torchrun --nnodes {} --nproc-per-node {} --node-rank "$NODE_RANK" '
        '--master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}"',
        nodes,
        ranks_per_node,
    )


def trainer_command(plan: Plan) -> Shell:
    """Return torchrun for a trainer whose ranks start again from what they saved.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    command = torchrun_command(plan)
    if not plan.workload.checkpoint.every_steps:
        return command
    return Shell.write("{} --max-restarts {}", command, RANK_RESTARTS)


def split_into_nodes(plan: Plan) -> tuple[int, int]:
    """Return the number of nodes, and of ranks on each.

    Raises:
        BadInput: the ranks do not fill whole nodes.
    """
    world_size = plan.layout.world_size
    per_node = plan.hardware.fabric.devices_per_node
    if world_size <= per_node:
        return 1, world_size
    nodes, remainder = divmod(world_size, per_node)
    if remainder:
        raise BadInput(
            Reason(
                field="layout.world_size",
                value=str(world_size),
                rule=f"must fill whole nodes of {per_node} devices",
                nearest=str(nodes * per_node),
            )
        )
    return nodes, per_node
