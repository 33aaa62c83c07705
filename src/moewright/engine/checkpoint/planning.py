"""Who writes which box, and which stored regions fill which piece: torch DCP's planner on our own
metadata.

Only the planner is torch's. Its storage layer is not used: the stock one keeps its metadata as a
pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moewright.engine.checkpoint.geometry import Box, find_tiling_fault
from moewright.engine.checkpoint.index import StoredShard, TensorEntry, payload_file_name
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES, LocalShard

ShardSpec = list[
    Any
]  # [name, dtype, shape, offsets, sizes]: a piece without its data, as ranks send it to each other


def describe_shards(pieces: Sequence[LocalShard]) -> list[ShardSpec]:
    return [
        [p.name, p.dtype, list(p.global_shape), *map(list, p.box)]
        for p in pieces
        if p.tensor.numel()
    ]


def plan_save(specs_by_rank: Sequence[Sequence[ShardSpec]]) -> tuple[TensorEntry, ...]:
    """Assign every box to one file; a box that several ranks hold goes to the one with the least to
    write so far.

    The same result on every rank. Raises ValueError, naming the tensor, when ranks disagree on
    shape or dtype, a rank holds a box twice, or the boxes do not cover the tensor exactly once:
    that is a fault of the caller.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, set[Box]] = {}
    for rank, rank_specs in enumerate(specs_by_rank):
        seen: set[tuple[str, Box]] = set()
        for name, dtype, shape, offsets, sizes in rank_specs:
            kind, box = (dtype, tuple(shape)), (tuple(offsets), tuple(sizes))
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name}: rank {rank} holds {kind} and another rank {kinds[name]}")
            if (name, box) in seen:
                raise ValueError(f"{name}: rank {rank} holds the box at {list(offsets)} twice")
            seen.add((name, box))
            parts.setdefault(name, set()).add(box)
    for name, tensor_parts in parts.items():
        if fault := find_tiling_fault(kinds[name][1], list(tensor_parts)):
            raise ValueError(f"{name}: {fault}")
    plans = [SavePlan([_write_item(spec) for spec in rank_specs]) for rank_specs in specs_by_rank]
    plans, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    shards: dict[str, list[StoredShard]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            shard = StoredShard(
                box=(tuple(chunk.offsets), tuple(chunk.sizes)), file=payload_file_name(rank)
            )
            shards.setdefault(item.index.fqn, []).append(shard)
    return tuple(
        TensorEntry(
            name=name, dtype=kinds[name][0], shape=kinds[name][1], shards=tuple(shards[name])
        )
        for name in sorted(kinds)
    )


def _write_item(spec: ShardSpec) -> WriteItem:
    name, dtype, shape, offsets, sizes = spec
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=TensorProperties(dtype=SAFETENSORS_DTYPES[dtype]),
            size=torch.Size(shape),
        ),
    )


def plan_load(
    tensor: TensorEntry, shards: Sequence[LocalShard]
) -> Iterator[tuple[LocalShard, StoredShard, ReadItem]]:
    """For each region to copy: the piece, the shard, and offsets within both.

    `wanted` are pieces of this tensor, checked to be of its shape; its shards tile it, so every
    element is reached.
    """
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=SAFETENSORS_DTYPES[tensor.dtype]),
        size=torch.Size(tensor.shape),
        chunks=[_chunk(shard.box) for shard in tensor.shards],
    )
    for item in create_read_items_for_chunk_list(
        tensor.name, stored, [_chunk(piece.box) for piece in shards]
    ):
        target, source = item.dest_index.index, item.storage_index.index
        assert target is not None
        assert source is not None
        yield shards[target], tensor.shards[source], item


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box[0]), sizes=torch.Size(box[1]))
