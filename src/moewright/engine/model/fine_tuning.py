"""What of a model trains: all of it, some parts, or adapters beside frozen weights."""

from __future__ import annotations

import torch

from moewright.engine.model.layers import Weight, list_parameters
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import adapter_shapes, has_adapter, is_trained, trains_all


def apply_fine_tuning(runtime: Runtime, model: torch.nn.Module) -> None:
    """Freeze the weights that the workload does not train, and make their adapters."""
    fine_tuning = runtime.workload.fine_tuning
    if trains_all(fine_tuning):
        return
    for parameter in list_parameters(model):
        weight = parameter.owner
        weight.is_trained = is_trained(fine_tuning, parameter.name)
        placement = weight.placement
        if not has_adapter(parameter.name, parameter.module, placement.global_shape, fine_tuning):
            continue
        first, second = adapter_shapes(
            placement.global_shape, placement.sharding, fine_tuning.lora_rank
        )
        weight.lora_a = Weight(runtime, *first[0], sharding=first[1])
        weight.lora_b = Weight(runtime, *second[0], sharding=second[1])
        weight.lora_factor = fine_tuning.lora_alpha / fine_tuning.lora_rank
