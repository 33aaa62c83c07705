"""A plan as a TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1).

Kubeflow makes a JobSet of it. Its torch runtime gives every pod torchrun's PET_* variables,
rendezvous included; the numbers of nodes and of ranks on each stand in the TrainJob. Volumes and
networks belong to the cluster's runtime.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from moewright.exporters.launch import LaunchSpec, build_launch_spec
from moewright.exporters.megatron.script import join_words
from moewright.exporters.torchrun import JOB_RESTARTS
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.quoting import Shell, Yaml

RUNTIME = "torch-distributed"
_RESOURCES = MappingProxyType({DeviceKind.CUDA: "nvidia.com/gpu", DeviceKind.ROCM: "amd.com/gpu"})
_API_VERSION = "trainer.kubeflow.org/v1alpha1"


def render_train_job(plan: Plan, *, job: str, run_dir: str, image: str) -> Yaml:
    """Return YAML for kubectl apply; `image` holds the trainer.

    A run of the engine goes on where it was saved, so that it gets a runtime of its own, whose
    JobSet starts all pods again when one fails.

    Raises:
        BadInput: as `build_launch_spec` does, and without an image.
    """
    if not image:
        rule = "is needed for k8s: the container image that holds the trainer"
        raise BadInput(Reason(field="--image", rule=rule, nearest="--image registry/trainer:tag"))
    launch = build_launch_spec(plan, job=job, run_dir=run_dir)
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": launch.nodes,
        "numProcPerNode": launch.ranks_per_node,
        # A TrainJob takes 128 arguments, fewer than a command may have: a shell splits one.
        "command": ["sh", "-c"],
        "args": [join_words((Shell.write("exec torchrun"), *map(Shell.words, launch.lines)))],
    }
    if launch.device.runs_cuda:
        trainer["resourcesPerNode"] = {
            kind: {_RESOURCES[launch.device]: launch.ranks_per_node}
            for kind in ("requests", "limits")
        }
    if launch.exported:
        trainer["env"] = [{"name": name, "value": value} for name, value in launch.exported]
    kind = "ClusterTrainingRuntime"
    name = RUNTIME
    documents: list[dict[str, Any]] = []
    if launch.runs_engine:
        kind = "TrainingRuntime"
        name = launch.name
        documents.append(_runtime_that_restarts(launch, image))
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": name}
    document = {
        "apiVersion": _API_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": launch.name, "labels": {"moewright/plan": plan.fingerprint}},
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }
    documents.append(document)
    return Yaml.concat(map(Yaml.dump, documents), "---\n")


def _runtime_that_restarts(launch: LaunchSpec, image: str) -> dict[str, Any]:
    """Return a runtime as torch-distributed is, with a failure policy of its JobSet."""
    pod = {"containers": [{"name": "node", "image": image}]}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": pod}},
        },
    }
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
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": JOB_RESTARTS},
                    "replicatedJobs": [node],
                }
            },
        },
    }
