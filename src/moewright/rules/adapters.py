"""What of a model trains: all of it, or low-rank adapters beside frozen weights (LoRA)."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from moewright.rules.param import Param
from moewright.rules.parameters import parameters
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Task, Workload

# The modules whose linears have an adapter: the targets that trainers choose by default.
_TARGETS = frozenset({Module.ATTENTION, Module.DENSE_MLP, Module.SHARED_EXPERTS})


def is_frozen(workload: Workload) -> bool:
    """Return whether the weights of the model are frozen, so that adapters alone train."""
    return workload.fine_tuning.task is Task.LORA


def trained_share(model: ModelSpec, workload: Workload) -> float:
    """Return the elements that train over those of the model; 1 where all of it trains."""
    if not is_frozen(workload):
        return 1.0
    return _adapter_share(model, workload.fine_tuning.lora_rank, _targets(workload))


def adapted_widths(model: ModelSpec, workload: Workload, layer: int) -> tuple[int, int]:
    """Return the summed input and output widths of the linears of a layer with an adapter.

    Routed experts are not among them.
    """
    return _adapted_widths(model, workload.fine_tuning.lora_rank, layer)


def _targets(workload: Workload) -> frozenset[Module]:
    return _TARGETS | ({Module.EXPERTS} if workload.fine_tuning.lora_experts else set())


def _is_adapted(param: Param, rank: int, targets: frozenset[Module]) -> bool:
    return param.module in targets and len(param.shape) > 1 and min(param.shape[-2:]) > rank


@lru_cache(maxsize=256)
def _adapted_widths(model: ModelSpec, rank: int, layer: int) -> tuple[int, int]:
    inputs = outputs = 0
    for param in parameters(model):
        if param.layer == layer and _is_adapted(param, rank, _TARGETS):
            linears = prod(param.shape[:-2])  # a gate and its product are one parameter
            inputs += linears * param.shape[-1]
            outputs += linears * param.shape[-2]
    return inputs, outputs


@lru_cache(maxsize=16)
def _adapter_share(model: ModelSpec, rank: int, targets: frozenset[Module]) -> float:
    """Return the elements of adapters of a rank over those of the model.

    An adapter of a linear [out, in] is two matrices [rank, in] and [out, rank].
    """
    total = adapters = 0
    for param in parameters(model):
        total += param.numel
        if _is_adapted(param, rank, targets):
            adapters += prod(param.shape[:-2]) * rank * sum(param.shape[-2:])
    return adapters / total
