"""What of a model trains: all of it, or low-rank adapters beside frozen weights (LoRA).

An adapter of a linear [..., out, in] is two matrices, [..., rank, in] and [..., out, rank], whose
product is added to the weight (Hu et al. 2021). TP, EP and ETP shard them as they shard the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType

from moewright.rules.shapes.param import Param, ShardedDims, name_in_layer
from moewright.rules.shapes.parameters import parameters, parameters_by_layer
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import AdapterTarget, FineTuningSpec, FrozenPart, Task, Workload

# The targets of the modules whose linears may have an adapter, attention apart.
_TARGETS: Mapping[Module, AdapterTarget] = MappingProxyType(
    {Module.DENSE_MLP: AdapterTarget.MLP, Module.SHARED_EXPERTS: AdapterTarget.SHARED_EXPERTS}
)
_OUTPUT = "attention.o"  # with which attention and recurrent mixers write their output
# The products that recompute=mla_up_proj repeats; it goes with latent attention alone.
MLA_UP_LINEARS = ("attention.q", "attention.q_up", "attention.kv_up")
_MODULE_PARTS: Mapping[Module, FrozenPart] = MappingProxyType(
    {
        Module.EMBEDDING: FrozenPart.EMBEDDINGS,
        Module.HEAD: FrozenPart.EMBEDDINGS,
        Module.ATTENTION: FrozenPart.ATTENTION,
        Module.DENSE_MLP: FrozenPart.MLP,
        Module.ROUTER: FrozenPart.ROUTER,
        Module.EXPERTS: FrozenPart.EXPERTS,
        Module.SHARED_EXPERTS: FrozenPart.SHARED_EXPERTS,
    }
)
_TABLES = ("embedding.", "position.", "head.")
# What has no adapter in any model: the loss of its tokens has no gradient for what indexers choose,
# and PEFT adapts no product by groups of columns (its adapters have the width of all groups).
_WITHOUT_ADAPTER = (".indexer.", ".attention.o_down.")
# How the names of a part's parameters begin within a layer.
_NAME_PARTS = (
    ("attention.", FrozenPart.ATTENTION),
    ("mlp.", FrozenPart.MLP),
    ("moe.router", FrozenPart.ROUTER),
    ("moe.experts.", FrozenPart.EXPERTS),
    ("moe.latent.", FrozenPart.EXPERTS),
    ("moe.shared.", FrozenPart.SHARED_EXPERTS),
    ("final_streams", FrozenPart.EMBEDDINGS),  # of which a head takes the sum
)
ADAPTER_PARTS = ("lora_a", "lora_b")


def is_frozen(workload: Workload) -> bool:
    """Return whether the weights of the model are frozen, so that adapters alone train."""
    return workload.fine_tuning.task is Task.LORA


def trains_all(fine_tuning: FineTuningSpec) -> bool:
    """Return whether every parameter of the model trains."""
    return fine_tuning.task is not Task.LORA and not fine_tuning.freeze


def trains_adapters(fine_tuning: FineTuningSpec) -> bool:
    """Return whether any linear of a model may have an adapter."""
    has_choice = fine_tuning.lora_experts or fine_tuning.lora_router
    return fine_tuning.task is Task.LORA and (bool(fine_tuning.lora_targets) or has_choice)


def is_trained(fine_tuning: FineTuningSpec, name: str) -> bool:
    """Return whether a parameter of the model trains, by its name; adapters apart."""
    if trains_all(fine_tuning):
        return True
    return fine_tuning.task is not Task.LORA and frozen_part(name) not in fine_tuning.freeze


def trains_module(fine_tuning: FineTuningSpec, module: Module) -> bool:
    """Return whether the weights of a module train; adapters apart."""
    if trains_all(fine_tuning):
        return True
    return fine_tuning.task is not Task.LORA and _MODULE_PARTS.get(module) not in fine_tuning.freeze


def trains_indexer(workload: Workload) -> bool:
    """Return whether the indexers of sparse attention train, where the model has any."""
    return workload.loss.indexer_coeff > 0 and trains_module(workload.fine_tuning, Module.ATTENTION)


def frozen_part(name: str) -> FrozenPart | None:
    """Return the part that a parameter belongs to; norms between blocks belong to none."""
    if name.startswith(_TABLES):
        return FrozenPart.EMBEDDINGS
    in_layer = name_in_layer(name)
    return next((part for start, part in _NAME_PARTS if in_layer.startswith(start)), None)


def is_linear(name: str) -> bool:
    """Return whether a parameter of more than one dim is a linear's weight: biases have two too."""
    return name.endswith(".weight")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a part of an adapter, by its name."""
    return name.endswith(tuple(f".{part}.weight" for part in ADAPTER_PARTS))


def has_adapter(
    name: str, module: Module, shape: tuple[int, ...], fine_tuning: FineTuningSpec
) -> bool:
    """Return whether a weight of a module has an adapter: a linear wider than the rank."""
    if fine_tuning.task is not Task.LORA or not is_linear(name):
        return False
    if any(part in name for part in _WITHOUT_ADAPTER):
        return False
    is_wider = len(shape) > 1 and min(shape[-2:]) > fine_tuning.lora_rank
    return is_wider and _is_target(name_in_layer(name), module, fine_tuning)


def _is_target(name: str, module: Module, fine_tuning: FineTuningSpec) -> bool:
    """Return whether a job adapts a linear of a module, by its name within its layer."""
    if module is Module.EXPERTS:
        return fine_tuning.lora_experts
    if module is Module.ROUTER:
        return fine_tuning.lora_router
    target = _TARGETS.get(module)
    if module is Module.ATTENTION:
        target = AdapterTarget.PROJ if name == _OUTPUT else AdapterTarget.QKV
    return target in fine_tuning.lora_targets


def adapter_shapes(
    shape: tuple[int, ...], sharded_dims: ShardedDims, rank: int
) -> tuple[tuple[tuple[int, ...], ShardedDims], tuple[tuple[int, ...], ShardedDims]]:
    """Return the shapes of an adapter's two matrices, and what shards which of their dims."""
    *lead, rows, columns = shape
    last = len(shape) - 1
    # The first matrix has no output rows that an axis could cut, the second no input columns.
    first_dims = tuple((axis, dim) for axis, dim in sharded_dims if dim != last - 1)
    second_dims = tuple((axis, dim) for axis, dim in sharded_dims if dim != last)
    return ((*lead, rank, columns), first_dims), ((*lead, rows, rank), second_dims)


def adapter_parameters(model: ModelSpec, fine_tuning: FineTuningSpec) -> tuple[Param, ...]:
    """Return the parameters of all adapters, in the order of their weights."""
    return tuple(_all_adapters(model, fine_tuning))


def _all_adapters(model: ModelSpec, fine_tuning: FineTuningSpec) -> Iterator[Param]:
    for param in parameters(model):
        if not has_adapter(param.name, param.module, param.shape, fine_tuning):
            continue
        matrices = adapter_shapes(param.shape, param.sharded_dims, fine_tuning.lora_rank)
        for part, (shape, sharded_dims) in zip(ADAPTER_PARTS, matrices, strict=True):
            name = param.name.removesuffix("weight") + f"{part}.weight"
            yield replace(param, name=name, shape=shape, sharded_dims=sharded_dims)


def trained_share(model: ModelSpec, workload: Workload) -> float:
    """Return the elements that train over those of the model; 1 where all of it trains."""
    if not is_frozen(workload):
        return 1.0
    return _adapter_share(model, workload.fine_tuning)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLinear:
    """The linears of a layer that share a parameter and have an adapter each.

    `name` is that of the parameter within its layer, as `attention.q`; `stack` counts the linears
    (a gate and its product are two), each of `inputs` and `outputs`. `cut` is "rows" or "columns",
    whichever of the weight TP shards, or "" where it is whole on every rank.
    """

    name: str
    module: Module
    stack: int
    inputs: int
    outputs: int
    cut: str
    is_expert: bool


@lru_cache(maxsize=1024)
def adapted_linears(
    model: ModelSpec, fine_tuning: FineTuningSpec, layer: int
) -> tuple[AdaptedLinear, ...]:
    """Return the linears of a layer that have an adapter."""
    return tuple(
        _adapted_linear(param)
        for param in parameters_by_layer(model).get(layer, ())
        if has_adapter(param.name, param.module, param.shape, fine_tuning)
    )


def _adapted_linear(param: Param) -> AdaptedLinear:
    last = len(param.shape) - 1
    sharded = {dim for axis, dim in param.sharded_dims if axis == "tp"}
    cut = ""
    if sharded:
        cut = "columns" if last in sharded else "rows"
    return AdaptedLinear(
        name=name_in_layer(param.name),
        module=param.module,
        # The first dim of an expert weight counts experts: those are not linears of one token.
        stack=prod(param.shape[1 if param.is_expert else 0 : -2]),
        inputs=param.shape[-1],
        outputs=param.shape[-2],
        cut=cut,
        is_expert=param.is_expert,
    )


def adapted_widths(model: ModelSpec, workload: Workload, layer: int) -> tuple[int, int]:
    """Return the summed input and output widths of the linears of a layer with an adapter.

    Routed experts and routers are not among them.
    """
    plain = replace(workload.fine_tuning, lora_experts=False, lora_router=False)
    linears = adapted_linears(model, plain, layer)
    inputs = sum(linear.stack * linear.inputs for linear in linears)
    return inputs, sum(linear.stack * linear.outputs for linear in linears)


@lru_cache(maxsize=16)
def _adapter_share(model: ModelSpec, fine_tuning: FineTuningSpec) -> float:
    """Return the elements of adapters over those of the model."""
    adapters = sum(param.numel for param in adapter_parameters(model, fine_tuning))
    return adapters / sum(param.numel for param in parameters(model))
