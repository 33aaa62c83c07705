"""What one rank holds of the parameters: which ones, and the shape of its shard of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from moewright.rules import grid
from moewright.rules.shapes.param import EMBEDDING_LAYER, Param
from moewright.rules.shapes.parameters import parameters_by_layer
from moewright.rules.timetable import stages
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

# Groups whose ranks hold replicas of a parameter, and therefore sum its gradients and share its
# optimizer state.
GRADIENT_GROUPS = ("dp_cp", "tp_cp_dp", "edp")
_TABLES = ("embedding.weight", "head.weight")


def gradient_group(cuts: Sequence[tuple[str, int]], layout: Layout) -> str:
    """Return the group of GRADIENT_GROUPS whose ranks hold replicas of a parameter.

    `cuts` are its (axis, dim) pairs. What TP does not shard (norms, router) sees other tokens or
    heads on each TP rank, so TP ranks sum its gradients too.
    """
    axes = {axis for axis, _ in cuts}
    if not axes.isdisjoint(("ep", "etp")):
        return "edp"
    # With tp=1 both groups have the same ranks: one name for them makes one set of buckets.
    if layout.tp == 1 or "tp" in axes:
        return "dp_cp"
    return "tp_cp_dp"


def holding_pp_ranks(name: str, model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a parameter, ascending, where more than one does.

    () for all other parameters. Several ranks hold an embedding that is tied to the head or that
    MTP depths use, and a head that MTP depths on another stage than the loss use. Such a table has
    buckets of its own, sharded alike on all its holders, and each shard's gradient is summed over
    them after the data-parallel sum: so all make the same update, bit for bit.
    """
    if layout.pp == 1 or name not in _TABLES:
        return ()
    return shared_table_ranks(model, layout).get(name, ())


@lru_cache(maxsize=4)  # called for each parameter of one layout
def shared_table_ranks(model: ModelSpec, layout: Layout) -> Mapping[str, tuple[int, ...]]:
    """Return the parameters that several pipeline ranks hold, with these ranks."""
    embedding_ranks = set()
    head_ranks = set()
    for chunk in stages.pipeline_chunks(model, layout):
        has_head = chunk.has_loss or chunk.mtp_layers > 0
        has_tied_head = has_head and model.tie_embeddings
        if chunk.has_embedding or chunk.mtp_layers > 0 or has_tied_head:
            embedding_ranks.add(chunk.pp_rank)
        if has_head and not model.tie_embeddings:
            head_ranks.add(chunk.pp_rank)
    ranks_by_name = dict(zip(_TABLES, (embedding_ranks, head_ranks), strict=True))
    return MappingProxyType(
        {name: tuple(sorted(ranks)) for name, ranks in ranks_by_name.items() if len(ranks) > 1}
    )


def shard_size(extent: int, parts: int) -> int:
    """Return what a rank holds of a dim that is sharded in equal parts, the last ones padded."""
    return -(-extent // parts)


def local_shape(param: Param, layout: Layout) -> tuple[int, ...]:
    """Return the shape of one rank's shard.

    A legal layout divides evenly; otherwise it is the shape of the largest shard.
    """
    shape = list(param.shape)
    for axis, dim in param.sharded_dims:
        shape[dim] = shard_size(shape[dim], grid.axis_size(layout, axis))
    return tuple(shape)


def holds_parameter(param: Param, layout: Layout, model: ModelSpec, pp_rank: int) -> bool:
    """Return whether a pipeline rank holds the parameter.

    A tied embedding is held twice when the first and the last stage differ; stages with an MTP
    depth hold the embedding too, because they embed the shifted tokens.
    """
    return _is_held(param, model, _rank_chunks(model, layout, pp_rank))


def holding_chunks(
    params: Sequence[Param], model: ModelSpec, layout: Layout, pp_rank: int
) -> list[tuple[int, ...]]:
    """Return for each parameter the chunks of a pipeline rank, numbered from 0, that use it."""
    chunks = _rank_chunks(model, layout, pp_rank)
    return [
        tuple(number for number, chunk in enumerate(chunks) if _is_in_chunk(param, model, *chunk))
        for param in params
    ]


def stage_parameters(model: ModelSpec, layout: Layout, pp_rank: int) -> tuple[Param, ...]:
    """Return the parameters that a pipeline rank holds, in registration order, with full shapes."""
    layers = layer_parameters(model, layout, pp_rank)
    return tuple(param for _, params in layers for param in params)


def parameters_by_stage(model: ModelSpec, layout: Layout) -> tuple[tuple[Param, ...], ...]:
    """Return `stage_parameters` of every pipeline rank."""
    return tuple(stage_parameters(model, layout, pp_rank) for pp_rank in range(layout.pp))


def layer_parameters(
    model: ModelSpec, layout: Layout, pp_rank: int
) -> tuple[tuple[int, tuple[Param, ...]], ...]:
    """Return the layers of a pipeline rank with the parameters that it holds of each.

    Embeddings, final norm and head, and MTP depths are layers as rules.shapes.parameters numbers
    them. Layers come in registration order, and so do the parameters of each.
    """
    chunks = _rank_chunks(model, layout, pp_rank)
    by_layer = parameters_by_layer(model)
    layers = []
    for layer in (EMBEDDING_LAYER, *sorted(i for chunk, _ in chunks for i in chunk.layers)):
        params = by_layer[layer]
        if layer == EMBEDDING_LAYER:
            params = _held(params, model, chunks)
        if params:
            layers.append((layer, params))
    for layer in range(model.layers, model.layers + 1 + model.mtp_layers):
        if params := _held(by_layer.get(layer, ()), model, chunks):
            layers.append((layer, params))
    return tuple(layers)


def _held(
    params: Sequence[Param], model: ModelSpec, chunks: Sequence[tuple[stages.Chunk, int]]
) -> tuple[Param, ...]:
    return tuple(param for param in params if _is_held(param, model, chunks))


def _rank_chunks(model: ModelSpec, layout: Layout, pp_rank: int) -> list[tuple[stages.Chunk, int]]:
    """Return the chunks of a pipeline rank, each with the number of MTP depths before it."""
    rank_chunks = []
    depths = 0
    for chunk in stages.pipeline_chunks(model, layout):
        if chunk.pp_rank == pp_rank:
            rank_chunks.append((chunk, depths))
        depths += chunk.mtp_layers
    return rank_chunks


def _is_held(param: Param, model: ModelSpec, chunks: Sequence[tuple[stages.Chunk, int]]) -> bool:
    return any(_is_in_chunk(param, model, chunk, first_depth) for chunk, first_depth in chunks)


def _is_in_chunk(param: Param, model: ModelSpec, chunk: stages.Chunk, first_depth: int) -> bool:
    if param.layer == EMBEDDING_LAYER:
        is_tied = model.tie_embeddings and chunk.has_loss and param.name == "embedding.weight"
        return chunk.has_embedding or chunk.mtp_layers > 0 or is_tied
    if param.layer < model.layers:
        return param.layer in chunk.layers
    if param.layer == model.layers:
        # An MTP depth runs its own pass through the shared head.
        return chunk.has_loss or (chunk.mtp_layers > 0 and param.name == "head.weight")
    return first_depth <= param.layer - model.layers - 1 < first_depth + chunk.mtp_layers
