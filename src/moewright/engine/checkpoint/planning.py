"""The plan of a save or a load: who writes which box, and which stored regions fill which shard.

The planner is torch DCP's, on our own metadata. Its storage layer is not used: the stock one keeps
its metadata as a pickle.
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

from moewright.engine.checkpoint.index import StoredShard, TensorEntry, payload_file_name
from moewright.engine.checkpoint.local_shard import (
    SAFETENSORS_DTYPES,
    Box,
    LocalShard,
    find_tiling_fault,
)

# [name, dtype, shape, offsets, sizes]: a shard without its data, as ranks send it to each other.
ShardSpec = list[Any]


def describe_shards(shards: Sequence[LocalShard]) -> list[ShardSpec]:
    """Describe the shards that hold anything, without their data."""
    return [
        [shard.name, shard.dtype, list(shard.global_shape), *map(list, shard.box)]
        for shard in shards
        if shard.tensor.numel()
    ]


def plan_save(specs_by_rank: Sequence[Sequence[ShardSpec]]) -> tuple[TensorEntry, ...]:
    """Assign every box to one file; the result is the same on every rank.

    A box that several ranks hold goes to the one with the least to write so far.

    Raises:
        ValueError: naming the tensor, when ranks disagree on shape or dtype, a rank holds a box
            twice, or the boxes do not cover the tensor exactly once: a fault of the caller.
    """
    kinds = _check_specs(specs_by_rank)
    plans = [SavePlan([_write_item(spec) for spec in specs]) for specs in specs_by_rank]
    plans, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    shards: dict[str, list[StoredShard]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = (tuple(chunk.offsets), tuple(chunk.sizes))
            stored = StoredShard(box=box, file=payload_file_name(rank))
            shards.setdefault(item.index.fqn, []).append(stored)
    return tuple(
        TensorEntry(name=name, dtype=dtype, shape=shape, shards=tuple(shards[name]))
        for name, (dtype, shape) in sorted(kinds.items())
    )


def _check_specs(
    specs_by_rank: Sequence[Sequence[ShardSpec]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor, once its boxes are known to tile it."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, set[Box]] = {}
    for rank, specs in enumerate(specs_by_rank):
        seen: set[tuple[str, Box]] = set()
        for name, dtype, shape, offsets, sizes in specs:
            kind = (dtype, tuple(shape))
            box = (tuple(offsets), tuple(sizes))
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name}: rank {rank} holds {kind} and another rank {kinds[name]}")
            if (name, box) in seen:
                raise ValueError(f"{name}: rank {rank} holds the box at {list(offsets)} twice")
            seen.add((name, box))
            boxes.setdefault(name, set()).add(box)
    for name, tensor_boxes in boxes.items():
        _, shape = kinds[name]
        if fault := find_tiling_fault(shape, list(tensor_boxes)):
            raise ValueError(f"{name}: {fault}")
    return kinds


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
    """Yield each region to copy: the local shard, the stored one, and the offsets within both.

    `shards` are of this tensor and known to be of its shape; the stored ones tile it, so every
    element is reached.
    """
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=SAFETENSORS_DTYPES[tensor.dtype]),
        size=torch.Size(tensor.shape),
        chunks=[_chunk(shard.box) for shard in tensor.shards],
    )
    local_chunks = [_chunk(shard.box) for shard in shards]
    for item in create_read_items_for_chunk_list(tensor.name, stored, local_chunks):
        target = item.dest_index.index
        source = item.storage_index.index
        assert target is not None
        assert source is not None
        yield shards[target], tensor.shards[source], item


def _chunk(box: Box) -> ChunkStorageMetadata:
    offsets, sizes = box
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
