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
    DTYPES,
    Index,
    PayloadReader,
    Row,
    flush_directory,
    read_box,
    read_index,
    require_space,
    verify_file,
    write_fault,
    write_tensors,
    write_text,
)
from moewright.engine.hf.folder import INDEX, SINGLE
from moewright.engine.hf.import_weights import Told
from moewright.engine.hf.names import Table, Theirs, copies, held_tensors, named, usual
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype

_SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them
_NAMES: Mapping[Dtype, str] = MappingProxyType(
    {Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"}
)
_WRITTEN_FIRST = ("F32", "BF16", "F16")  # the order of dtypes in a file, as safetensors has it

Files = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A checkpoint, and the files that it will be. `places` says which part of which of ours each
    of theirs is."""

    checkpoint: Path
    index: Index
    places: Mapping[str, tuple[str, Theirs]]
    files: Files
    texts: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for rows in self.files.values() for row in rows)


def model_of(index: Index, checkpoint: Path) -> ModelSpec:
    data = index.extra.get("model")
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(checkpoint), rule="does not say which model it is of"))
    return from_data(ModelSpec, data, where=f"{checkpoint}: model")


def plan_export(
    checkpoint: Path, dtype: Dtype | None, config: Callable[[ModelSpec, Dtype], str]
) -> Export:
    """A checkpoint that was imported goes back as it came, but for a `dtype` that is asked for; one
    of a run goes out in the names of its family, in the precision that it was trained in, with the
    config.json that `config` makes; so does one that was imported packed, in bf16.

    Raises BadInput for a model that has no form of Hugging Face.
    """
    index = read_index(checkpoint)
    model, came = model_of(index, checkpoint), index.extra.get("hf")
    if came is not None:
        kinds = {name: kind for rows in came["files"].values() for name, kind in rows}
        places = _places(
            named(model, kinds.keys(), checkpoint),
            {n: o for n, o in copies(model).items() if n in kinds},
        )
        if dtype is None:
            files = {
                file: [
                    Row(name=name, dtype=kind, shape=places[name][1].shape) for name, kind in rows
                ]
                for file, rows in came["files"].items()
            }
            return Export(
                checkpoint=checkpoint,
                index=index,
                places=places,
                files=_sorted(files),
                texts=dict(came["texts"]),
            )
    else:
        spare = {
            name: ours for name, ours in copies(model).items() if name.startswith("model.layers.")
        }
        places = _places(usual(model), spare)
    computed = index.extra.get("train", {}).get("precision", Dtype.FP32)
    dtype = dtype or Dtype(index.extra.get("unpacked_to", computed))
    trained = {held.name for held in held_tensors(model) if held.trained}
    files = _cut(
        [
            Row(name=name, dtype=_NAMES[dtype] if ours in trained else "F32", shape=theirs.shape)
            for name, (ours, theirs) in places.items()
        ]
    )
    texts = {"config.json": config(model, dtype)}
    if len(files) > 1:
        texts[INDEX] = _index_text(files)
    return Export(
        checkpoint=checkpoint, index=index, places=places, files=_sorted(files), texts=texts
    )


def run_export(plan: Export, out: Path, told: Told) -> None:
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
                    part / file, rows, _tensors(plan, rows, reader, told), {"format": "pt"}
                )
        for name, text in plan.texts.items():
            write_text(part / name, text)
        flush_directory(part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise write_fault(out, error, plan.nbytes) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _tensors(
    plan: Export, rows: Sequence[Row], reader: PayloadReader, told: Told
) -> Iterator[torch.Tensor]:
    entries = {entry.name: entry for entry in plan.index.tensors}
    for row in rows:
        ours, theirs = plan.places[row.name]
        entry, lead = entries.get(ours), len(theirs.index)
        if entry is None:
            raise BadInput(Reason(field=ours, rule=f"is not in the checkpoint {plan.checkpoint}"))
        offsets = (*theirs.index, *(0,) * (len(entry.shape) - lead))
        box = read_box(reader, entry, offsets, (*(1,) * lead, *entry.shape[lead:]))
        yield theirs.seen(box.view(entry.shape[lead:])).to(DTYPES[row.dtype])
        told(row.nbytes)


def _places(table: Table, spare: Mapping[str, str]) -> dict[str, tuple[str, Theirs]]:
    places = {theirs.name: (ours, theirs) for ours, parts in table.items() for theirs in parts}
    return places | {name: (ours, table[ours][0]) for name, ours in spare.items()}


def _cut(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Files of at most _SHARD_BYTES, or of one tensor, named as transformers does."""
    parts: list[list[Row]] = [[]]
    for row in rows:
        if parts[-1] and sum(one.nbytes for one in parts[-1]) + row.nbytes > _SHARD_BYTES:
            parts.append([])
        parts[-1].append(row)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {
        f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, 1)
    }


def _index_text(files: Files) -> str:
    placed = {row.name: file for file, rows in files.items() for row in rows}
    total = sum(row.nbytes for rows in files.values() for row in rows)
    data = {"metadata": {"total_size": total}, "weight_map": placed}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _sorted(files: Files) -> Files:
    def place(row: Row) -> tuple[int, str]:
        return _WRITTEN_FIRST.index(row.dtype), row.name

    return {file: tuple(sorted(rows, key=place)) for file, rows in files.items()}
