"""What one rank holds of a parameter: its local shape, and whether its pipeline rank has it at
all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from moewright.rules import grid, stages
from moewright.rules.parameters import EMBEDDING_LAYER, Param, parameters
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

# Groups whose ranks hold a parameter in copies, and therefore sum its gradients and share its
# optimizer state.
GRADIENT_GROUPS = ("dp_cp", "tp_cp_dp", "edp")
_TABLES = ("embedding.weight", "head.weight")


def gradient_group(cuts: Sequence[tuple[str, int]], layout: Layout) -> str:
    """The group of GRADIENT_GROUPS over which a parameter cut like that (axis, dim) is replicated.

    What TP does not cut (norms, router) sees other tokens or heads on each TP rank, so TP ranks sum
    too.
    """
    axes = {axis for axis, _ in cuts}
    if not axes.isdisjoint(("ep", "etp")):
        return "edp"
    return "dp_cp" if layout.tp == 1 or "tp" in axes else "tp_cp_dp"


def holding_pp_ranks(name: str, model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """The pipeline ranks that hold a parameter, ascending, where more than one does; () elsewhere.

    Those are an embedding that is tied to the head or that MTP depths use, and a head that depths
    of another stage than the loss use. Such a table has buckets of its own, cut alike on all its
    holders, and each shard is summed over them after the data-parallel sum: so all make the same
    update, bit for bit.
    """
    return (
        shared_table_ranks(model, layout).get(name, ()) if layout.pp > 1 and name in _TABLES else ()
    )


@lru_cache(maxsize=4)  # asked for each parameter of one layout
def shared_table_ranks(model: ModelSpec, layout: Layout) -> Mapping[str, tuple[int, ...]]:
    """The parameters that several pipeline ranks hold, and these ranks."""
    chunks = stages.pipeline_chunks(model, layout)
    embeds = {
        chunk.pp_rank
        for chunk in chunks
        if chunk.has_embedding or chunk.mtp_layers or (model.tie_embeddings and chunk.has_loss)
    }
    heads = (
        {chunk.pp_rank for chunk in chunks if chunk.has_loss or chunk.mtp_layers}
        if not model.tie_embeddings
        else set()
    )
    found = {
        name: tuple(sorted(ranks)) for name, ranks in zip(_TABLES, (embeds, heads), strict=True)
    }
    return MappingProxyType({name: ranks for name, ranks in found.items() if len(ranks) > 1})


def shard_size(extent: int, parts: int) -> int:
    """What a rank holds of a dim cut in equal parts; padding makes the last ones as large as the
    rest."""
    return -(-extent // parts)


def local_shape(param: Param, layout: Layout) -> tuple[int, ...]:
    """Shape of one rank's shard. A legal layout divides evenly; otherwise the shape of the largest
    shard."""
    shape = list(param.shape)
    for axis, dim in param.sharded_dims:
        shape[dim] = shard_size(shape[dim], grid.axis_size(layout, axis))
    return tuple(shape)


def holds_parameter(param: Param, layout: Layout, model: ModelSpec, pp_rank: int) -> bool:
    """Whether a pipeline rank holds the parameter.

    A tied embedding is held twice when the first and the last stage differ; stages with an MTP
    depth hold the embedding too, because they embed the shifted tokens.
    """
    return any(
        _in_chunk(param, model, chunk, first) for chunk, first in _chunks_of(model, layout, pp_rank)
    )


def stage_parameters(model: ModelSpec, layout: Layout, pp_rank: int) -> tuple[Param, ...]:
    """The parameters that a pipeline rank holds, in registration order, with their full shapes."""
    mine = _chunks_of(model, layout, pp_rank)
    return tuple(
        p
        for p in parameters(model)
        if any(_in_chunk(p, model, chunk, first) for chunk, first in mine)
    )


def parameters_by_stage(model: ModelSpec, layout: Layout) -> tuple[tuple[Param, ...], ...]:
    """Return `stage_parameters` of every pipeline rank."""
    return tuple(
        tuple(param for _, params in layer_parameters(model, layout, pp_rank) for param in params)
        for pp_rank in range(layout.pp)
    )


def layer_parameters(
    model: ModelSpec, layout: Layout, pp_rank: int
) -> tuple[tuple[int, tuple[Param, ...]], ...]:
    """Return the layers of a pipeline rank with the parameters that it holds of each.

    Embeddings, final norm and head, and MTP depths are layers as rules.parameters numbers them.
    Layers come in registration order, and so do the parameters of each.
    """
    chunks = _chunks_of(model, layout, pp_rank)
    by_layer = _by_layer(model)
    found = []
    for layer in (EMBEDDING_LAYER, *sorted(i for chunk, _ in chunks for i in chunk.layers)):
        params = by_layer[layer]
        if layer == EMBEDDING_LAYER:
            params = _held(params, model, chunks)
        if params:
            found.append((layer, params))
    for layer in range(model.layers, model.layers + 1 + model.mtp_layers):
        if params := _held(by_layer[layer], model, chunks):
            found.append((layer, params))
    return tuple(found)


def _held(
    params: Sequence[Param], model: ModelSpec, chunks: Sequence[tuple[stages.Chunk, int]]
) -> tuple[Param, ...]:
    return tuple(
        param
        for param in params
        if any(_in_chunk(param, model, chunk, first) for chunk, first in chunks)
    )


@lru_cache(maxsize=2)
def _by_layer(model: ModelSpec) -> Mapping[int, tuple[Param, ...]]:
    of_layer: dict[int, list[Param]] = {}
    for param in parameters(model):
        of_layer.setdefault(param.layer, []).append(param)
    return MappingProxyType({layer: tuple(params) for layer, params in of_layer.items()})


def _chunks_of(model: ModelSpec, layout: Layout, pp_rank: int) -> list[tuple[stages.Chunk, int]]:
    """The chunks of a pipeline rank, each with the number of MTP depths in the chunks before it."""
    mine, depths = [], 0
    for chunk in stages.pipeline_chunks(model, layout):
        if chunk.pp_rank == pp_rank:
            mine.append((chunk, depths))
        depths += chunk.mtp_layers
    return mine


def _in_chunk(param: Param, model: ModelSpec, chunk: stages.Chunk, first_mtp: int) -> bool:
    if param.layer == EMBEDDING_LAYER:
        tied_head = model.tie_embeddings and chunk.has_loss and param.name == "embedding.weight"
        return chunk.has_embedding or chunk.mtp_layers > 0 or tied_head
    if param.layer < model.layers:
        return param.layer in chunk.layers
    if param.layer == model.layers:
        # An MTP depth runs its own pass through the shared head.
        return chunk.has_loss or (chunk.mtp_layers > 0 and param.name == "head.weight")
    return first_mtp <= param.layer - model.layers - 1 < first_mtp + chunk.mtp_layers
