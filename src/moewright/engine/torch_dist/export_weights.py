"""A checkpoint of ours, written in any layout, becomes a torch_dist checkpoint of Megatron-LM.

torch.distributed.checkpoint writes it, from tensors that are read one at a time. Megatron-LM loads
it in any TP, PP and EP: a chunk is a layer, or an expert of one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from moewright.engine.hf.folder import open_hf_folder
from moewright.engine.hf.names import beside_tensors
from moewright.engine.torch_dist.import_weights import TRACKER_FILE
from moewright.engine.torch_dist.names import is_stacked, list_written_names, split_name
from moewright.engine.torch_dist.optimizer_state import (
    OWN_PREFIXES,
    STATE_PREFIX,
    ChainedOptimizers,
    describe_optimizer,
    describe_weights,
)
from moewright.families.weight_names import BESIDE_PREFIX
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
class _WrittenTensor:
    """A tensor that is written: its shape, its dtype, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_WrittenChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronExportPlan:
    """A checkpoint of ours, and the tensors that Megatron-LM's will have.

    `left_out` counts the tensors that have no place there by the part of the Hugging Face folder in
    which they lie, such as "model.visual".
    """

    checkpoint: Path
    index: CheckpointIndex
    model: ModelSpec
    tensors: Mapping[str, _WrittenTensor]
    common: Mapping[str, Any]  # what is no tensor
    left_out: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(
            torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
            for tensor in self.tensors.values()
        )


def plan_megatron_export(
    checkpoint: Path,
    dtype: Dtype | None,
    optimizer: ChainedOptimizers | None = None,
    base: Path | None = None,
) -> MegatronExportPlan:
    """Plan the tensors of a checkpoint, in bf16 when no `dtype` is given.

    With `optimizer`, main weights and moments in fp32 are among them. `base` is the Hugging Face
    folder from which a run started; what sees or hears in it is left out too.

    Raises:
        BadInput: a tensor of the model has no name in Megatron-LM's checkpoints, or the checkpoint
            has no state of AdamW where that is asked for.
    """
    index = read_index(checkpoint)
    model = parse_stored_model(index, checkpoint)
    model_tensors = list_model_tensors(model)
    entries = {entry.name: entry for entry in index.tensors}
    for tensor in model_tensors:
        if tensor.name not in entries:
            rule = f"is not in the checkpoint {checkpoint}"
            raise BadInput(Reason(field=tensor.name, rule=rule))
    tensors = {
        name: _plan_tensor(name, sources, entries, model, _choose_dtype(name, dtype))
        for name, sources in list_written_names(model, model_tensors).items()
    }
    common: Mapping[str, Any] = describe_weights(index.step)
    if optimizer is not None:
        common = describe_optimizer(index, checkpoint, optimizer, is_moe=model.moe is not None)
        trained = [tensor for tensor in model_tensors if tensor.trained]
        for name, sources in list_written_names(model, trained).items():
            weights = tensors[name]
            for state, prefix in OWN_PREFIXES.items():
                tensors[f"{STATE_PREFIX}{state}.{name}"] = _move(weights, prefix, sources, entries)
    return MegatronExportPlan(
        checkpoint=checkpoint,
        index=index,
        model=model,
        tensors=tensors,
        common=common,
        left_out=_count_left_out(model, entries, base),
    )


def _count_left_out(
    model: ModelSpec, names: Collection[str], base: Path | None
) -> Mapping[str, int]:
    """Count what lies beside the language model, in a checkpoint or in the folder of its run."""
    others = [name for name in names if name.startswith(BESIDE_PREFIX)]
    if not others and base is not None:
        stored = open_hf_folder(base).tensors
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        others = [tensor.name for tensor, _ in beside_tensors(model, shapes)]
    parts = (name.removeprefix(BESIDE_PREFIX).split(".") for name in others)
    return Counter(".".join(part[: 2 if part[0] == "model" else 1]) for part in parts)


def _choose_dtype(name: str, dtype: Dtype | None) -> torch.dtype:
    """Return the dtype of a weight; biases that move with the load are kept in fp32."""
    if name.endswith(".expert_bias"):
        return torch.float32
    return _DTYPES[dtype or Dtype.BF16]


def _move(
    weights: _WrittenTensor,
    prefix: str,
    sources: Sequence[str],
    entries: Mapping[str, TensorEntry],
) -> _WrittenTensor:
    """Return the tensor of a state of the optimizer, cut as the weights are."""
    for source in sources:
        if prefix + source not in entries:
            rule = "is not in the checkpoint: it is not of a run, or of one that Muon updates"
            nearest = "leave --optimizer out"
            raise BadInput(Reason(field=prefix + source, rule=rule, nearest=nearest))
    chunks = tuple(
        replace(chunk, sources=tuple(prefix + source for source in chunk.sources))
        for chunk in weights.chunks
    )
    return replace(weights, dtype=torch.float32, chunks=chunks)


def _plan_tensor(
    name: str,
    sources: Sequence[str],
    entries: Mapping[str, TensorEntry],
    model: ModelSpec,
    dtype: torch.dtype,
) -> _WrittenTensor:
    """Return a tensor that is written from some of ours."""
    by_layer: dict[int, list[str]] = {}
    for source in sources:
        by_layer.setdefault(split_name(model, source)[0], []).append(source)
    chunks = []
    shape: tuple[int, ...] = ()
    for layer, names in by_layer.items():
        lead = (layer,) if is_stacked(name) else ()
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
    if is_stacked(name):
        shape = (model.layers, *shape)
    return _WrittenTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))


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
            # One thread: each tensor is read when it is written, and one is in memory at a time.
            storage = FileSystemWriter(str(folder), thread_count=1)
            # The plan names all tensors, so that there is none in the dictionary.
            save({}, storage_writer=storage, planner=planner, no_dist=True)
        torch.save(dict(plan.common), folder / "common.pt")
        # Megatron-LM's CheckpointingConfig, by which a reader knows the format.
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
        for name, tensor in self._plan.tensors.items():
            properties = TensorProperties(dtype=tensor.dtype)
            for number, chunk in enumerate(tensor.chunks):
                index = MetadataIndex(name, torch.Size(chunk.offsets), number)
                self._chunks[index] = chunk
                stored = ChunkStorageMetadata(
                    offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)
                )
                size = torch.Size(tensor.shape)
                data = TensorWriteData(chunk=stored, properties=properties, size=size)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        chunk = self._chunks[write_item.index]
        dtype = self._plan.tensors[write_item.index.fqn].dtype
        value = self._read(chunk).reshape(chunk.sizes).to(dtype).contiguous()
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
