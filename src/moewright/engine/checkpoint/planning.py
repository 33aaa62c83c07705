"""The plan of a save or a load: who writes which box, and which stored regions fill which shard.

What several ranks hold is cut, and each of them writes a part (rules.checkpoint_shares). Loads are
planned by torch DCP's planner, on our own metadata. Its storage layer is not used: the stock one
keeps its metadata as a pickle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moewright.engine.checkpoint.index import StoredShard, TensorEntry, payload_file_name
from moewright.engine.checkpoint.local_shard import (
    SAFETENSORS_DTYPES,
    Box,
    LocalShard,
    find_tiling_fault,
    flat_range_boxes,
)
from moewright.rules.checkpoint_shares import share_range

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
    """Assign every element to one file; the result is the same on every rank.

    What the same ranks hold, of elements of one width, is shared equally among them.

    Raises:
        ValueError: naming the tensor, when ranks disagree on shape or dtype, a rank holds a box
            twice, or the boxes do not cover the tensor exactly once: a fault of the caller.
    """
    kinds = _check_specs(specs_by_rank)
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, specs in enumerate(specs_by_rank):
        for name, _, _, offsets, sizes in specs:
            holders[name, (tuple(offsets), tuple(sizes))].append(rank)
    rows: dict[tuple[tuple[int, ...], int], list[tuple[str, Box]]] = defaultdict(list)
    # Sorted, for every rank must come to the same plan by itself.
    for (name, box), held_by in sorted(holders.items()):
        dtype, _ = kinds[name]
        # Of one width, so that equal shares of elements are equal shares of bytes.
        rows[tuple(held_by), SAFETENSORS_DTYPES[dtype].itemsize].append((name, box))
    shards: dict[str, list[StoredShard]] = defaultdict(list)
    for (ranks, _), boxes in rows.items():
        for name, stored in _share_out(boxes, ranks):
            shards[name].append(stored)
    return tuple(
        TensorEntry(name=name, dtype=dtype, shape=shape, shards=tuple(shards[name]))
        for name, (dtype, shape) in sorted(kinds.items())
    )


def _share_out(
    boxes: Sequence[tuple[str, Box]], ranks: Sequence[int]
) -> Iterator[tuple[str, StoredShard]]:
    """Yield the parts of boxes that lie in a row, each in the file of the rank that writes it."""
    total = sum(prod(sizes) for _, (_, sizes) in boxes)
    ends = [share_range(total, len(ranks), place)[1] for place in range(len(ranks))]
    place = 0
    first = 0  # elements in front of the box
    for name, (offsets, sizes) in boxes:
        start, end = first, first + prod(sizes)
        while start < end:
            # Shares are empty where there are fewer elements than ranks.
            while ends[place] <= start:
                place += 1
            stop = min(ends[place], end)
            for inner_offsets, part_sizes in flat_range_boxes(sizes, start - first, stop - first):
                outer = tuple(map(sum, zip(offsets, inner_offsets, strict=True)))
                file = payload_file_name(ranks[place])
                yield name, StoredShard(box=(outer, part_sizes), file=file)
            start = stop
        first = end


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
        # torch types them as optional; its planner sets both for chunks.
        assert target is not None
        assert source is not None
        yield shards[target], tensor.shards[source], item


def _chunk(box: Box) -> ChunkStorageMetadata:
    offsets, sizes = box
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
