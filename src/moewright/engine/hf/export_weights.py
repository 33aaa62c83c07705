"""A checkpoint of ours, written in any layout, into a Hugging Face folder: one tensor in memory at
a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from moewright.codec import from_data
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    CheckpointIndex,
    PayloadReader,
    TensorHeader,
    fsync_directory,
    read_index,
    read_tensor_box,
    require_space,
    verify_file,
    write_error,
    write_tensors,
    write_text,
)
from moewright.engine.hf.folder import INDEX_FILE, SINGLE_FILE
from moewright.engine.hf.import_weights import ReportProgress
from moewright.engine.hf.names import (
    HfTensor,
    NameTable,
    duplicate_tensors,
    family_name_table,
    list_model_tensors,
    match_names,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype

_SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them
_DTYPE_NAMES: Mapping[Dtype, str] = MappingProxyType(
    {Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"}
)
_DTYPE_ORDER = ("F32", "BF16", "F16")  # the order of dtypes in a file, as safetensors has it

HeadersByFile = Mapping[str, Sequence[TensorHeader]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """A checkpoint, and the files that it will be. `places` says which part of which of ours each
    of theirs is."""

    checkpoint: Path
    index: CheckpointIndex
    sources: Mapping[str, tuple[str, HfTensor]]
    files: HeadersByFile
    texts: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for rows in self.files.values() for row in rows)


def parse_stored_model(index: CheckpointIndex, checkpoint: Path) -> ModelSpec:
    data = index.extra.get("model")
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(checkpoint), rule="does not say which model it is of"))
    return from_data(ModelSpec, data, where=f"{checkpoint}: model")


def plan_export(
    checkpoint: Path, dtype: Dtype | None, config: Callable[[ModelSpec, Dtype], str]
) -> ExportPlan:
    """A checkpoint that was imported goes back as it came, but for a `dtype` that is asked for; one
    of a run goes out in the names of its family, in the precision that it was trained in, with the
    config.json that `config` makes; so does one that was imported packed, in bf16.

    Raises BadInput for a model that has no form of Hugging Face.
    """
    index = read_index(checkpoint)
    model, came = parse_stored_model(index, checkpoint), index.extra.get("hf")
    if came is not None:
        kinds = {name: kind for rows in came["files"].values() for name, kind in rows}
        places = _map_sources(
            match_names(model, kinds.keys(), checkpoint),
            {n: o for n, o in duplicate_tensors(model).items() if n in kinds},
        )
        if dtype is None:
            files = {
                file: [
                    TensorHeader(name=name, dtype=kind, shape=places[name][1].shape)
                    for name, kind in rows
                ]
                for file, rows in came["files"].items()
            }
            return ExportPlan(
                checkpoint=checkpoint,
                index=index,
                sources=places,
                files=_sort_headers(files),
                texts=dict(came["texts"]),
            )
    else:
        spare = {
            name: ours
            for name, ours in duplicate_tensors(model).items()
            if name.startswith("model.layers.")
        }
        places = _map_sources(family_name_table(model), spare)
    computed = index.extra.get("train", {}).get("precision", Dtype.FP32)
    dtype = dtype or Dtype(index.extra.get("unpacked_to", computed))
    trained = {held.name for held in list_model_tensors(model) if held.trained}
    files = _split_into_files(
        [
            TensorHeader(
                name=name,
                dtype=_DTYPE_NAMES[dtype] if ours in trained else "F32",
                shape=theirs.shape,
            )
            for name, (ours, theirs) in places.items()
        ]
    )
    texts = {"config.json": config(model, dtype)}
    if len(files) > 1:
        texts[INDEX_FILE] = _index_text(files)
    return ExportPlan(
        checkpoint=checkpoint, index=index, sources=places, files=_sort_headers(files), texts=texts
    )


def run_export(plan: ExportPlan, out: Path, on_progress: ReportProgress) -> None:
    """Write the folder `out`: all of it, or nothing. Raises BadInput when it holds something, or
    the disk is full."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            Reason(field=str(out), rule="exists and is not empty", nearest="a new folder")
        )
    for entry in plan.index.files:
        verify_file(plan.checkpoint, entry)
    require_space(out.parent, plan.nbytes)
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file, rows in plan.files.items():
            with PayloadReader(plan.checkpoint) as reader:  # maps no more than one file needs
                write_tensors(
                    part / file,
                    rows,
                    _read_tensors(plan, rows, reader, on_progress),
                    {"format": "pt"},
                )
        for name, text in plan.texts.items():
            write_text(part / name, text)
        fsync_directory(part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise write_error(out, error, plan.nbytes) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _read_tensors(
    plan: ExportPlan, rows: Sequence[TensorHeader], reader: PayloadReader, told: ReportProgress
) -> Iterator[torch.Tensor]:
    entries = {entry.name: entry for entry in plan.index.tensors}
    for row in rows:
        ours, theirs = plan.sources[row.name]
        entry, lead = entries.get(ours), len(theirs.index)
        if entry is None:
            raise BadInput(Reason(field=ours, rule=f"is not in the checkpoint {plan.checkpoint}"))
        offsets = (*theirs.index, *(0,) * (len(entry.shape) - lead))
        box = read_tensor_box(reader, entry, offsets, (*(1,) * lead, *entry.shape[lead:]))
        yield theirs.to_hf(box.view(entry.shape[lead:])).to(SAFETENSORS_DTYPES[row.dtype])
        told(row.nbytes)


def _map_sources(table: NameTable, spare: Mapping[str, str]) -> dict[str, tuple[str, HfTensor]]:
    places = {theirs.name: (ours, theirs) for ours, parts in table.items() for theirs in parts}
    return places | {name: (ours, table[ours][0]) for name, ours in spare.items()}


def _split_into_files(rows: Sequence[TensorHeader]) -> dict[str, list[TensorHeader]]:
    """Files of at most _SHARD_BYTES, or of one tensor, named as transformers does."""
    parts: list[list[TensorHeader]] = [[]]
    for row in rows:
        if parts[-1] and sum(one.nbytes for one in parts[-1]) + row.nbytes > _SHARD_BYTES:
            parts.append([])
        parts[-1].append(row)
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {
        f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, 1)
    }


def _index_text(files: HeadersByFile) -> str:
    placed = {row.name: file for file, rows in files.items() for row in rows}
    total = sum(row.nbytes for rows in files.values() for row in rows)
    data = {"metadata": {"total_size": total}, "weight_map": placed}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _sort_headers(files: HeadersByFile) -> HeadersByFile:
    def place(row: TensorHeader) -> tuple[int, str]:
        return _DTYPE_ORDER.index(row.dtype), row.name

    return {file: tuple(sorted(rows, key=place)) for file, rows in files.items()}
