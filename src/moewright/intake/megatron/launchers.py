"""How many ranks a command starts: what its launcher, the scheduler in front and the job say.

The launcher that starts the trainer comes first, then the words of the scheduler in front of it,
then what the job asks for (`#SBATCH`, a manifest). A count that nobody says stays unknown, with the
reason, and what two of them say differently is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from moewright.intake.megatron.unknown import UNKNOWN_VALUE, find_unknown
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import is_whole_number, whole_number

PYTHONS = ("python", "python3")
# Programs that start the trainer on a node, or on all of them.
LAUNCHERS = ("torchrun", "dlrover-run", "deepspeed", "accelerate", *PYTHONS)
RUNNERS = ("uv",)  # of modules, where they start no program of those
SCHEDULERS = ("srun", "mpirun", "mpiexec", "prun", "jsrun", "aprun", "flux")
_DISTRIBUTED = "torch.distributed"
ONE_PROCESS = "python starts one process, and nothing says of how many"
_ANY_COUNT = ("gpu", "auto", "cpu", "xpu")  # torchrun counts the devices itself
# What a launcher is told in the environment; torchrun's agent reads these.
_VARIABLES = MappingProxyType({"nnodes": "PET_NNODES", "nproc-per-node": "PET_NPROC_PER_NODE"})
# What launchers call the nodes, the ranks of each and all ranks.
_NODES = ("nnodes", "num-nodes", "num-machines")
_PER_NODE = ("nproc-per-node", "num-gpus")
_TOTAL = ("num-processes",)
# Behind this name stands how many pods a manifest asks for; no variable of a shell has it.
POD_COUNT = "pods of the manifest"
_HOSTS = ("hostfile", "H", "include", "exclude")  # of DeepSpeed, where files say the nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What a scheduler calls the number of tasks, of nodes and of tasks on each."""

    tasks: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()  # tasks of each of `tasks`, where these are sets of resources


_OPEN_MPI = TaskOptions(
    tasks=("-n", "-np", "--np", "-c"),
    per_node=("-N", "-npernode", "--npernode", "-ppn", "--ppn"),
    hosts=("-H", "-host", "--host", "-hosts"),
)
_TASK_OPTIONS = MappingProxyType(
    {
        "srun": TaskOptions(
            tasks=("-n", "--ntasks"), nodes=("-N", "--nodes"), per_node=("--ntasks-per-node",)
        ),
        "mpirun": _OPEN_MPI,
        "mpiexec": _OPEN_MPI,
        "prun": _OPEN_MPI,
        "jsrun": TaskOptions(
            tasks=("-n", "--nrs"),
            per_node=("-r", "--rs_per_host"),
            factor=("-a", "--tasks_per_rs"),
        ),
        "aprun": TaskOptions(tasks=("-n", "--pes"), per_node=("-N", "--pes-per-node")),
        "flux": TaskOptions(
            tasks=("-n", "--ntasks"), nodes=("-N", "--nodes"), per_node=("--tasks-per-node",)
        ),
    }
)
_RANK_WORD = re.compile(r"--?n(nodes|proc[-_]per[-_]node)\b")
_MAPPING = re.compile(r"ppr:(\d+):node")
_SLOTS = re.compile(r"[^,:]+:(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCount:
    """Nodes and ranks on each, 0 where nobody says them.

    `account` says who says them, or why they are not known; `notes` are what else is said of them,
    and differs.
    """

    nodes: int = 0
    per_node: int = 0
    account: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tasks:
    """What a scheduler starts; `nodes` also where it does not say how many tasks."""

    nodes: int = 0
    tasks: int = 0
    per_node: int = 0
    account: str = ""


def split_launcher(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the words up to the launcher, and those behind it; None for another command."""
    for programs in (LAUNCHERS, RUNNERS):
        for position, word in enumerate(words):
            name = _name_program(word, programs)
            if name in PYTHONS and _starts_another(words[position + 1 : position + 2]):
                continue
            if name in programs:
                arguments = list(words[position + 1 :])
                if name == "accelerate" and arguments[:1] == ["launch"]:
                    del arguments[0]
                return [*words[:position], name], arguments
    return _split_other_launcher(words)


def _split_other_launcher(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return a launcher that is not known, by its own words: ranks in front of a program."""
    program = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    if not any(_RANK_WORD.match(word) for word in words[1:program]):
        return None
    first = next(at for at, word in enumerate(words) if word.startswith("-"))  # its first option
    return list(words[:first]), list(words[first:])


def _name_program(word: str, programs: Sequence[str]) -> str:
    """Return the program that a word names; where only running tells, what each branch ends in."""
    name = UNKNOWN_VALUE.sub("", word).rpartition("/")[2]
    unknown = find_unknown(word) if not name else None
    if unknown is None:
        return name
    return next((word for word in reversed(unknown.words) if word in programs), "")


def _starts_another(following: Sequence[str]) -> bool:
    """Whether Python runs a launcher's own file: `python /opt/bin/deepspeed train.py`."""
    return any("/" in word and word.rpartition("/")[2] in LAUNCHERS for word in following)


# A launcher that starts a rank on each device that it sees, and what hides others from it.
_TAKES_ALL = ("deepspeed",)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = re.compile(r"\d+(,\d+)*")


def count_ranks(
    started_by: Sequence[str],
    arguments: Sequence[str],
    options: Mapping[str, str],
    variables: Mapping[str, str],
    world_size: str = "",
) -> RankCount:
    """Return how many ranks a command starts, and who says so.

    Args:
        started_by: the words up to the launcher; none for a configuration.
        arguments: the words behind it.
        options: the launcher's own, by their names with dashes and without those in front.
        variables: what the command is started in, with those of the scheduler's job.
        world_size: all ranks, as the trainer's own options may say.

    Raises:
        BadInput: a count is no number.
    """
    launcher = started_by[-1].rpartition("/")[2] if started_by else ""
    tasks = _count_tasks(started_by, variables)
    is_program = launcher in PYTHONS and not any(_DISTRIBUTED in word for word in arguments)
    if is_program and not _find(options, _PER_NODE):
        return _count_plain(tasks, variables, world_size)
    name = launcher or "the configuration"
    if launcher in PYTHONS:
        name = _DISTRIBUTED
    told = {**dict(_told_by_environment(variables)), **options}
    nodes_text = _find(told, _NODES)
    total = _number(_find(told, _TOTAL), "num-processes")
    nodes = _number(nodes_text, "nnodes")
    if not nodes_text and not any(host in told for host in _HOSTS):
        nodes = 1
    per_node = _number(_find(told, _PER_NODE), "nproc-per-node")
    if not per_node and name in _TAKES_ALL:
        per_node = _count_visible(variables)
    if is_whole_number(world_size) and not per_node:
        total = total or int(world_size)
    if total and nodes:
        per_node = total // nodes
    notes = tuple(_compare(name, nodes, told=bool(nodes_text), tasks=tasks))
    if nodes and per_node:
        return RankCount(nodes=nodes, per_node=per_node, account=f"by {name}", notes=notes)
    return RankCount(nodes=nodes, per_node=per_node, account=_explain(name, nodes), notes=notes)


def _count_plain(tasks: _Tasks, variables: Mapping[str, str], world_size: str) -> RankCount:
    """Return the ranks of a program that starts no others: a task of the scheduler each."""
    if tasks.tasks:
        account = f"by {tasks.account}"
        nodes = tasks.nodes or 1
        if tasks.per_node:
            nodes = tasks.nodes or max(1, tasks.tasks // tasks.per_node)
        if tasks.tasks % nodes:
            nodes = 1
        return RankCount(nodes=nodes, per_node=tasks.tasks // nodes, account=account)
    total = world_size or variables.get("WORLD_SIZE", "")
    if whole_number(total):
        return RankCount(nodes=1, per_node=int(total), account="by WORLD_SIZE")
    return RankCount(nodes=1, account=ONE_PROCESS)


def _count_visible(variables: Mapping[str, str]) -> int:
    """Return the devices that a launcher sees which takes all; 0 where the script hides none."""
    text = variables.get(_VISIBLE, "")
    return len(text.split(",")) if _DEVICES.fullmatch(text) else 0


def _explain(name: str, nodes: int) -> str:
    if not nodes:
        return f"{name} takes its nodes from elsewhere"
    return f"{name} is not told how many ranks a node has"


def _told_by_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what a launcher reads in its environment."""
    for option, variable in _VARIABLES.items():
        if variables.get(variable):
            yield option, variables[variable]


def _compare(name: str, nodes: int, *, told: bool, tasks: _Tasks) -> Iterator[str]:
    """Yield what the scheduler says of the nodes, where the launcher says something else."""
    if tasks.nodes and told and nodes and tasks.nodes != nodes:
        yield (
            f"{tasks.account} asks for {tasks.nodes} nodes and {name} starts {nodes}: "
            f"{nodes} are planned"
        )
    if tasks.per_node > 1:
        yield f"{tasks.account} starts {name} {tasks.per_node} times a node: it is planned once"


def _count_tasks(words: Sequence[str], variables: Mapping[str, str]) -> _Tasks:
    """Return what the scheduler in front of a launcher starts.

    What srun is not told is as the job has it.
    """
    names = [word.rpartition("/")[2] for word in words]
    place = next((p for p, name in enumerate(names) if name in SCHEDULERS), -1)
    if place < 0:
        return _Tasks(nodes=_integer(variables, POD_COUNT), account="the manifest")
    name = names[place]
    behind = words[place + 1 : -1]
    options = _TASK_OPTIONS[name]
    tasks = _find_count(behind, options.tasks)
    nodes = _find_count(behind, options.nodes)
    per_node = _find_count(behind, options.per_node)
    factor = _find_count(behind, options.factor) or 1
    mapping = next(filter(None, map(_MAPPING.search, behind)), None)
    if mapping is not None:
        per_node = int(mapping[1])
    slots = _sum_slots(behind, options.hosts)
    if name == "srun" and not tasks:
        nodes = nodes or _integer(variables, "SLURM_NNODES")
        per_node = per_node or _integer(variables, "SLURM_NTASKS_PER_NODE")
        tasks = nodes * per_node or _integer(variables, "SLURM_NTASKS")
    return _Tasks(
        nodes=nodes,
        tasks=(tasks or nodes * per_node or slots) * factor,
        per_node=per_node * factor,
        account=name,
    )


def _sum_slots(words: Sequence[str], names: Sequence[str]) -> int:
    """Return the slots of `-H node1:8,node2:8`; 0 where none are given."""
    for word, following in pairwise((*words, "")):
        if word in names:
            return sum(map(int, _SLOTS.findall(following)))
    return 0


def _find(options: Mapping[str, str], names: Sequence[str]) -> str:
    return next((options[name] for name in names if name in options), "")


def _number(text: str, name: str) -> int:
    """Return a count; 0 where it is not said, or only running tells it.

    Raises:
        BadInput: it is no number.
    """
    if is_whole_number(text):
        return int(text)
    if text and not UNKNOWN_VALUE.search(text) and text not in _ANY_COUNT:
        rule = "must be a whole number: the layout does not change while training"
        raise BadInput(Reason(field=f"--{name}", value=text[:60], rule=rule))
    return 0


def _integer(variables: Mapping[str, str], name: str) -> int:
    return whole_number(variables.get(name, ""))


def _find_count(words: Sequence[str], names: Sequence[str]) -> int:
    """Return the number behind an option of a scheduler, also in `-n16` and `-n=16`; 0 for none."""
    for word, following in pairwise((*words, "")):
        for name in names:
            inline = word.removeprefix(name).removeprefix("=")
            if word == name and is_whole_number(following):
                return int(following)
            if word.startswith(name) and is_whole_number(inline):
                return int(inline)
    return 0
