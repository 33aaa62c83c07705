"""A plan as a TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1).

Kubeflow makes a JobSet of it. Its torch runtime gives every pod torchrun's PET_* variables,
rendezvous included; the numbers of nodes and of ranks on each stand in the TrainJob. Its pods come
from a runtime of its own, beside it: with memory that ranks of a node share, the adapters of the
network, and claims for data and checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import comment_lines, join_words
from moewright.exporters.torchrun import JOB_RESTARTS, NO_FILES, RANK_RESTARTS, RunFiles
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind, Hardware, NetworkKind
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell, Yaml

# Devices of a node's network that a pod asks for, by kind: a name of the cluster's device plugin.
_ADAPTERS = MappingProxyType(
    {
        "ib": "rdma/rdma_shared_device_a",  # as NVIDIA's Network Operator names it
        "roce": "rdma/rdma_shared_device_a",
        "efa": "vpc.amazonaws.com/efa",
    }
)
# Adapters of an EFA instance with eight GPUs, by part (AWS, instance types with EFA).
_EFA_ADAPTERS = MappingProxyType({"A100": 4, "H100": 32, "H200": 16, "B200": 8, "B300": 16})
_RESOURCES = MappingProxyType({DeviceKind.CUDA: "nvidia.com/gpu", DeviceKind.ROCM: "amd.com/gpu"})
_API_VERSION = "trainer.kubeflow.org/v1alpha1"


def render_train_job(
    plan: Plan, *, job: str, run_dir: str, image: str, files: RunFiles = NO_FILES
) -> Yaml:
    """Return YAML for kubectl apply; `image` holds the trainer.

    A run that goes on where it was saved has a runtime whose JobSet starts all pods again when one
    fails.

    Raises:
        BadInput: as `build_launch_spec` does, without an image, or where checkpoints would be lost
            with their pod.
    """
    if not image:
        rule = "is needed for k8s: the container image that holds the trainer"
        raise BadInput(Reason(field="--image", rule=rule, nearest="--image registry/trainer:tag"))
    launch = build_launch_spec(plan, job=job, run_dir=run_dir, image=image, files=files)
    if launch.save and not launch.save.startswith("/"):
        rule = "is a folder of the pod, which ends with it: a claim is mounted at an absolute path"
        nearest = f"--save /{launch.save}"
        raise BadInput(Reason(field="--save", value=launch.save, rule=rule, nearest=nearest))
    restarts = Shell.write(" --max-restarts {}", RANK_RESTARTS) if launch.save else Shell.write("")
    start = Shell.write("exec torchrun{}", restarts)
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": launch.nodes,
        "numProcPerNode": launch.ranks_per_node,
        # A TrainJob takes 128 arguments, fewer than a command may have: a shell splits one.
        "command": ["sh", "-c"],
        "args": [join_words((start, *map(Shell.words, launch.lines)))],
    }
    resources = dict(_list_resources(launch, plan.hardware))
    if resources:
        # Devices cannot be overcommitted: Kubernetes wants both to be equal.
        trainer["resourcesPerNode"] = {kind: dict(resources) for kind in ("requests", "limits")}
    exported = (*launch.exported, *((item.name, item.value) for item in launch.transport))
    if exported:
        trainer["env"] = [{"name": name, "value": value} for name, value in exported]
    runtime = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": launch.name,
    }
    document = {
        "apiVersion": _API_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": launch.name, "labels": {"moewright/plan": plan.fingerprint}},
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }
    documents = (_render_runtime(launch), document)
    # They say what Megatron-LM needs besides the plan; our engine has the job.
    comments = () if job else comment_lines(plan, Yaml, files)
    reasons = (
        Yaml.comment("{}={}: {}", item.name, item.value, item.reason) for item in launch.transport
    )
    head = Yaml.lines((*comments, *reasons))
    return Yaml.concat((head, Yaml.concat(map(Yaml.dump, documents), "---\n")))


def _list_resources(launch: LaunchSpec, hardware: Hardware) -> Iterator[tuple[str, int]]:
    """Yield what a pod asks for: its GPUs, and adapters where it talks to other nodes."""
    if not launch.device.runs_cuda:
        return
    yield _RESOURCES[launch.device], launch.ranks_per_node
    network = hardware.fabric.network
    if launch.nodes > 1 and network in _ADAPTERS:
        part = re.split("[- ]", hardware.device.name)[0]
        count = _EFA_ADAPTERS.get(part, 1) if network == NetworkKind.EFA else 1
        yield _ADAPTERS[network], count


def _render_runtime(launch: LaunchSpec) -> dict[str, Any]:
    """Return a runtime as torch-distributed is, whose pods have volumes and may pin memory.

    Where the run saves, its JobSet has a failure policy.
    """
    jobs: dict[str, Any] = {
        "replicatedJobs": [
            {
                "name": "node",
                "template": {
                    "metadata": {
                        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                    },
                    "spec": {"template": {"spec": _render_pod(launch)}},
                },
            }
        ]
    }
    # A run that saves nothing would begin at its first step again.
    if launch.runs_engine or launch.save:
        jobs = {"failurePolicy": {"maxRestarts": JOB_RESTARTS}, **jobs}
    return {
        "apiVersion": _API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": launch.name,
            "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {
                "numNodes": launch.nodes,
                "torch": {"numProcPerNode": launch.ranks_per_node},
            },
            "template": {"spec": jobs},
        },
    }


def _render_pod(launch: LaunchSpec) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "node", "image": launch.image}
    # NCCL and data workers share memory, of which a container has 64 MiB by itself.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for name, path in launch.folders:
        claim = {"claimName": f"{launch.name}-{name}"}
        volumes.append({"name": name, "persistentVolumeClaim": claim})
        mounts.append({"name": name, "mountPath": path})
    if launch.device.runs_cuda:
        # Adapters read and write memory that is pinned.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
