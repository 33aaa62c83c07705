"""Manifests of Kubernetes: the command of a job's pods, and how many pods and devices there are.

Read are jobs of Kubeflow (TrainJob, PyTorchJob, MPIJob), Jobs, JobSets, RayJobs and whatever else
has containers. A pod is a node.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moewright.codec.yaml_text import parse_yaml
from moewright.intake.megatron.launchers import POD_COUNT, SCHEDULERS, split_launcher
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import is_whole_number, whole_number

_MARKS = (re.compile(r"^apiVersion:", re.MULTILINE), re.compile(r"^kind:", re.MULTILINE))
_DOCUMENT = re.compile(r"^---.*$", re.MULTILINE)
_TEMPLATE = "{{"
_DEVICES = re.compile(r".*(/gpu|[Aa]scend\w*|/neuron\w*|/tpu)$")
# How many of what stands below, by key; all of them count.
_COUNTS = ("replicas", "parallelism")
# The kinds whose pods get torchrun's own variables.
_TOLD_BY_VARIABLES = ("TrainJob", "PyTorchJob")
_EXPANDED = re.compile(r"\$\(([A-Za-z_]\w*)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The command of a job's pods as lines of shell, and the variables that the job's kind sets."""

    command: str
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Container:
    """A container's words and variables, in so many pods of so many devices."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    pods: int
    devices: int


def is_manifest(text: str) -> bool:
    """Whether a text in YAML is of Kubernetes."""
    return all(mark.search(text) for mark in _MARKS)


def read_manifest(text: str, *, where: str) -> Manifest:
    """Return the command of the pods that train.

    Raises:
        BadInput: it is no YAML, or none of its containers has a command.
    """
    if _TEMPLATE in text:
        rule = "is a template of Helm: give what `helm template` prints"
        raise BadInput(Reason(field=where, rule=rule))
    documents = [parse_yaml(part, where=where) for part in _DOCUMENT.split(text) if part.strip()]
    for document in documents:
        if not isinstance(document, Mapping):
            continue
        kind = str(document.get("kind", ""))
        containers = [*_list_containers(document, 1), *_list_trainers(document)]
        started = [container for container in containers if container.words]
        trains = next(filter(_starts_trainer, started), next(iter(started), None))
        if trains is not None:
            return _read_container(kind, document, trains, containers)
    rule = "is of Kubernetes, and none of its containers has a command"
    raise BadInput(Reason(field=where, rule=rule))


def _starts_trainer(container: _Container) -> bool:
    line = " ".join(container.words).split()
    return split_launcher(line) is not None or not set(SCHEDULERS).isdisjoint(line)


def _read_container(
    kind: str, document: Mapping[str, Any], container: _Container, containers: list[_Container]
) -> Manifest:
    """Return the command of a container, with what the job's kind tells its pods."""
    # Of PyTorchJob the master is a node beside the workers; MPIJob's launcher is none.
    alike = [other for other in containers if other.devices == container.devices]
    pods = sum(other.pods for other in alike) if kind == "PyTorchJob" else container.pods
    variables = {POD_COUNT: str(pods)}
    spec = document.get("spec")
    per_node = ""
    if isinstance(spec, Mapping):
        trainer = spec.get("trainer")
        section = trainer if isinstance(trainer, Mapping) else spec
        per_node = str(section.get("numProcPerNode", spec.get("nprocPerNode", "")))
    if kind in _TOLD_BY_VARIABLES:
        devices = str(container.devices) if container.devices else ""
        per_node = per_node if is_whole_number(per_node) else devices
        variables |= {"PET_NNODES": str(pods), "PET_NPROC_PER_NODE": per_node}
        variables |= {"WORLD_SIZE": str(pods * whole_number(per_node, 1)), "RANK": "0"}
    if kind == "MPIJob":
        variables.pop(POD_COUNT)
    told = container.variables
    words = [
        _EXPANDED.sub(lambda match: told.get(match[1], match[0]), word) for word in container.words
    ]
    exports = (f"export {name}={shlex.quote(value)}" for name, value in told.items())
    return Manifest(command="\n".join((*exports, shlex.join(words))), variables=variables)


def _list_trainers(document: Mapping[str, Any]) -> Iterator[_Container]:
    """Yield the trainer of a TrainJob, and the entry of a RayJob."""
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return
    trainer = spec.get("trainer")
    if isinstance(trainer, Mapping):
        resources = {"resources": trainer.get("resourcesPerNode", {})}
        nodes = whole_number(str(trainer.get("numNodes", 1)), 1)
        yield _read_words({**trainer, **resources}, nodes)
    entry = spec.get("entrypoint")
    if isinstance(entry, str):
        yield _read_words({"command": ["sh", "-c", entry]}, 1)


def _list_containers(data: Any, pods: int) -> Iterator[_Container]:
    """Yield the containers below a part of a manifest, in so many pods."""
    if isinstance(data, Mapping):
        for key in _COUNTS:
            pods *= whole_number(str(data.get(key, 1)), 1)
        for container in data.get("containers") or ():
            if isinstance(container, Mapping):
                yield _read_words(container, pods)
        for key, inner in data.items():
            if key != "containers":
                yield from _list_containers(inner, pods)
    elif isinstance(data, list):
        for inner in data:
            yield from _list_containers(inner, pods)


def _read_words(container: Mapping[str, Any], pods: int) -> _Container:
    parts = (container.get("command"), container.get("args"))
    words = tuple(str(word) for part in parts if isinstance(part, list) for word in part)
    variables = {
        str(item["name"]): str(item["value"])
        for item in container.get("env") or ()
        if isinstance(item, Mapping) and "name" in item and "value" in item
    }
    return _Container(
        words=words, variables=variables, pods=pods, devices=_count_devices(container)
    )


def _count_devices(container: Mapping[str, Any]) -> int:
    resources = container.get("resources")
    requests = resources if isinstance(resources, Mapping) else {}
    for kind in ("limits", "requests"):
        section = requests.get(kind)
        if isinstance(section, Mapping):
            for name, count in section.items():
                if _DEVICES.match(str(name)):
                    return whole_number(str(count))
    return 0
