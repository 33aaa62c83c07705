"""A checkpoint of ours, written in any layout, becomes a torch_dist checkpoint of Megatron-LM.

torch.distributed.checkpoint writes it, from tensors that are read one at a time. Megatron-LM loads
it in any TP, PP and EP: a chunk is a layer, or an expert of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from moewright.engine.checkpoint import (
    CheckpointIndex,
    PayloadReader,
    TensorEntry,
    read_index,
    read_tensor_box,
    verify_file,
)
from moewright.engine.hf.candidates import list_model_tensors
from moewright.engine.hf.export_weights import parse_stored_model, write_folder
from moewright.engine.torch_dist.import_weights import TRACKER_FILE
from moewright.engine.torch_dist.names import list_written_names, split_name
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype

_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
_EXPERTS = "moe.experts."
_ITERATION_FOLDER = "iter_{:07d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenChunk:
    """A chunk of a tensor that is written: our tensors that it is made of, and the expert."""

    sources: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    expert: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronExportPlan:
    """A checkpoint of ours, and the tensors that Megatron-LM's will have."""

    checkpoint: Path
    index: CheckpointIndex
    model: ModelSpec
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    chunks: Mapping[str, tuple[_WrittenChunk, ...]]

    @property
    def nbytes(self) -> int:
        sizes = (torch.Size(shape).numel() for shape in self.shapes.values())
        return sum(sizes) * self.dtype.itemsize


def plan_megatron_export(checkpoint: Path, dtype: Dtype | None) -> MegatronExportPlan:
    """Plan the tensors of a checkpoint, in bf16 when no `dtype` is given.

    Raises:
        BadInput: a tensor of the model has no name in Megatron-LM's checkpoints.
    """
    index = read_index(checkpoint)
    model = parse_stored_model(index, checkpoint)
    tensors = list_model_tensors(model)
    entries = {entry.name: entry for entry in index.tensors}
    for tensor in tensors:
        if tensor.name not in entries:
            rule = f"is not in the checkpoint {checkpoint}"
            raise BadInput(Reason(field=tensor.name, rule=rule))
    shapes = {}
    chunks = {}
    for name, sources in list_written_names(model, tensors).items():
        shapes[name], chunks[name] = _plan_tensor(sources, entries, model)
    return MegatronExportPlan(
        checkpoint=checkpoint,
        index=index,
        model=model,
        dtype=_DTYPES[dtype or Dtype.BF16],
        shapes=shapes,
        chunks=chunks,
    )


def _plan_tensor(
    sources: Sequence[str], entries: Mapping[str, TensorEntry], model: ModelSpec
) -> tuple[tuple[int, ...], tuple[_WrittenChunk, ...]]:
    """Return the shape of a tensor that is written, and its chunks."""
    by_layer: dict[int, list[str]] = {}
    for source in sources:
        by_layer.setdefault(split_name(source)[0], []).append(source)
    is_stacked = len(by_layer) == model.layers and len(by_layer) > 1
    chunks = []
    lead: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    for layer, names in by_layer.items():
        lead = (layer,) if is_stacked else ()
        inner, experts = _inner_shape(names, entries)
        for expert in range(experts) if experts else (-1,):
            index = lead if expert < 0 else (*lead, expert)
            chunks.append(
                _WrittenChunk(
                    sources=tuple(names),
                    offsets=(*index, *(0,) * len(inner)),
                    sizes=(*(1,) * len(index), *inner),
                    expert=expert,
                )
            )
        shape = (experts, *inner) if experts else inner
    return ((model.layers, *shape) if is_stacked else shape), tuple(chunks)


def _inner_shape(
    names: Sequence[str], entries: Mapping[str, TensorEntry]
) -> tuple[tuple[int, ...], int]:
    """Return the shape of what a layer has under a name, and its number of experts, 0: none."""
    shapes = [entries[name].shape for name in names]
    if len(names) > 1:  # query, key and value
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]), 0
    (shape,) = shapes
    experts = 0
    if _EXPERTS in names[0]:
        experts, *rest = shape
        shape = tuple(rest)
    if ".gate_up." in names[0]:  # gate above up
        shape = (shape[0] * shape[1], *shape[2:])
    return shape, experts


def run_megatron_export(
    plan: MegatronExportPlan, out: Path, on_progress: Callable[[int], None]
) -> None:
    """Write the folder `out`, as Megatron-LM's --load takes it: all of it, or nothing.

    Raises:
        BadInput: when it holds something, or the disk is full.
    """
    for entry in plan.index.files:
        verify_file(plan.checkpoint, entry)
    with write_folder(out, plan.nbytes) as working:
        folder = working / _ITERATION_FOLDER.format(plan.index.step)
        with PayloadReader(plan.checkpoint) as reader:
            planner = _Planner(plan, reader, on_progress)
            storage = FileSystemWriter(str(folder), thread_count=1)
            save({}, storage_writer=storage, planner=planner, no_dist=True)
        torch.save({"iteration": plan.index.step, "checkpoint_version": 3.0}, folder / "common.pt")
        facts = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (folder / "metadata.json").write_text(json.dumps(facts))
        (working / TRACKER_FILE).write_text(str(plan.index.step))


class _Planner(DefaultSavePlanner):
    """A planner of a save whose tensors are read when they are written."""

    def __init__(
        self, plan: MegatronExportPlan, reader: PayloadReader, on_progress: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._plan = plan
        self._reader = reader
        self._on_progress = on_progress
        self._entries = {entry.name: entry for entry in plan.index.tensors}
        self._chunks: dict[MetadataIndex, _WrittenChunk] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        properties = TensorProperties(dtype=self._plan.dtype)
        for name, chunks in self._plan.chunks.items():
            for number, chunk in enumerate(chunks):
                index = MetadataIndex(name, torch.Size(chunk.offsets), number)
                self._chunks[index] = chunk
                stored = ChunkStorageMetadata(
                    offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)
                )
                size = torch.Size(self._plan.shapes[name])
                data = TensorWriteData(chunk=stored, properties=properties, size=size)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        chunk = self._chunks[write_item.index]
        value = self._read(chunk).reshape(chunk.sizes).to(self._plan.dtype).contiguous()
        self._on_progress(value.nbytes)
        return value

    def _read(self, chunk: _WrittenChunk) -> torch.Tensor:
        parts = [self._read_source(name, chunk.expert) for name in chunk.sources]
        if len(parts) == 1:
            return parts[0]
        return _merge_heads(self._plan.model, dict(zip("qkv", parts, strict=True)))

    def _read_source(self, name: str, expert: int) -> torch.Tensor:
        entry = self._entries[name]
        if expert < 0:
            return read_tensor_box(self._reader, entry, (0,) * len(entry.shape), entry.shape)
        offsets = (expert, *(0,) * (len(entry.shape) - 1))
        return read_tensor_box(self._reader, entry, offsets, (1, *entry.shape[1:]))


def _merge_heads(model: ModelSpec, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Merge query, key and value group by group."""
    attention = model.attention
    groups = attention.kv_heads
    rest = parts["q"].shape[1:]
    grouped = [
        parts[name].reshape(groups, heads, attention.head_dim, *rest)
        for name, heads in (("q", attention.heads // groups), ("k", 1), ("v", 1))
    ]
    return torch.cat(grouped, dim=1).flatten(0, 2)
