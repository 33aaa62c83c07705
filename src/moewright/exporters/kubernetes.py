"""A plan as a TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1), which makes a JobSet
of it.

Its torch runtime gives every pod torchrun's PET_* variables, rendezvous included; the numbers of
nodes and of ranks on each stand in the TrainJob. Volumes and networks belong to the cluster's
runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moewright.exporters.launch import build_launch_spec
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan

RUNTIME = "torch-distributed"


def render_train_job(plan: Plan, *, job: str, run_dir: str, image: str) -> str:
    """YAML for kubectl apply. `image` holds the trainer. Raises BadInput as `start_of` does, and
    without an image."""
    if not image:
        rule = "is needed for k8s: the container image that holds the trainer"
        raise BadInput(Reason(field="--image", rule=rule, nearest="--image registry/trainer:tag"))
    start = build_launch_spec(plan, job=job, run_dir=run_dir)
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": start.nodes,
        "numProcPerNode": start.ranks_per_node,
        "command": ["torchrun"],
        "args": [word for words in start.lines for word in words],
    }
    if start.uses_gpus:
        trainer["resourcesPerNode"] = {
            kind: {"nvidia.com/gpu": start.ranks_per_node} for kind in ("requests", "limits")
        }
    if start.exported:
        trainer["env"] = [{"name": name, "value": value} for name, value in start.exported]
    runtime = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": RUNTIME,
    }
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": start.name, "labels": {"moewright/plan": plan.fingerprint}},
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }
    return "\n".join(_lines(document, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    """Block YAML. Texts are quoted as in JSON, which YAML 1.2 reads as it is."""
    pad = "  " * depth
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping | list):
                yield f"{pad}{key}:"
                yield from _lines(inner, depth + 1)
            else:
                yield f"{pad}{key}: {json.dumps(inner, ensure_ascii=False)}"
        return
    assert isinstance(value, Sequence)
    for item in value:
        if isinstance(item, Mapping):
            first, *rest = _lines(item, depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {json.dumps(item, ensure_ascii=False)}"
