"""A checkpoint of ours, written in any layout, becomes a Hugging Face folder.

One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from moewright.engine.hf.import_weights import TEXT_FILES, ReportProgress
from moewright.engine.hf.names import (
    HfTensor,
    NameTable,
    duplicate_tensors,
    family_name_table,
    list_model_tensors,
    match_names,
)
from moewright.engine.hf.packed import tensor_error
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype

# The bytes of a file at most, as transformers cuts them.
_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES: Mapping[Dtype, str] = MappingProxyType(
    {Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"}
)
# The order of dtypes in a file, as safetensors has it.
_DTYPE_ORDER = ("F32", "BF16", "F16")

# The names that a checkpoint may give files of weights: no folders, nothing hidden.
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")

HeadersByFile = Mapping[str, Sequence[TensorHeader]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HfOrigin:
    """The folder that a checkpoint was imported from, as its `extra` describes it.

    `texts` are small files, word for word; `files` has the name and the dtype of each tensor of
    every file of weights, in order.
    """

    texts: Mapping[str, str]
    files: Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """Files that go beside weights: by name, what is copied from where, and what is written."""

    copies: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """A checkpoint, and the files that it will be.

    `sources` maps the name of each tensor in the files to the name of the checkpoint's tensor that
    it is made of, and to the part of it. `texts` are written and `copies` copied beside them.
    """

    checkpoint: Path
    index: CheckpointIndex
    sources: Mapping[str, tuple[str, HfTensor]]
    files: HeadersByFile
    texts: Mapping[str, str]
    copies: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for headers in self.files.values() for header in headers)


def parse_stored_model(index: CheckpointIndex, checkpoint: Path) -> ModelSpec:
    """Return the model that a checkpoint says it is of, or raise BadInput."""
    data = index.extra.get("model")
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(checkpoint), rule="does not say which model it is of"))
    return from_data(ModelSpec, data, where=f"{checkpoint}: model")


def plan_export(
    checkpoint: Path,
    dtype: Dtype | None,
    config: Callable[[ModelSpec, Dtype], str],
    companions: Companions = Companions(),
) -> ExportPlan:
    """Plan the files of a checkpoint.

    A checkpoint that was imported is written as it came, unless a `dtype` is given. One of a run is
    written in the names of its family, in the precision that it was trained in, with the
    config.json that `config` makes; so is one that was imported from packed weights, in bf16. The
    `companions` lie beside weights that do not go back as they came.

    Raises:
        BadInput: for a model with a tensor that Hugging Face has no name for.
    """
    index = read_index(checkpoint)
    model = parse_stored_model(index, checkpoint)
    _check_shapes(index, model)
    origin = _parse_origin(index, checkpoint)
    if origin is not None:
        sources = _map_imported(model, origin, checkpoint)
        if dtype is None:
            files = _original_headers(origin, sources)
            texts = dict(origin.texts)
            if len(files) > 1 and INDEX_FILE not in texts:
                texts[INDEX_FILE] = _index_text(files)
            return ExportPlan(
                checkpoint=checkpoint,
                index=index,
                sources=sources,
                files=_sort_headers(files),
                texts=texts,
            )
    else:
        mtp_duplicates = {
            hf_name: name
            for hf_name, name in duplicate_tensors(model).items()
            if hf_name.startswith("model.layers.")
        }
        sources = _map_sources(family_name_table(model), mtp_duplicates)
    if dtype is None:
        dtype = _stored_precision(index, checkpoint)
    files = _split_into_files(_build_headers(model, sources, dtype))
    texts = {**companions.texts, "config.json": config(model, dtype)}
    if len(files) > 1:
        texts[INDEX_FILE] = _index_text(files)
    return ExportPlan(
        checkpoint=checkpoint,
        index=index,
        sources=sources,
        files=_sort_headers(files),
        texts=texts,
        copies=companions.copies,
    )


def _check_shapes(index: CheckpointIndex, model: ModelSpec) -> None:
    """Raise BadInput for a tensor whose shape is not that of the model."""
    shapes = {tensor.name: tensor.shape for tensor in list_model_tensors(model)}
    for entry in index.tensors:
        expected = shapes.get(entry.name, entry.shape)
        if entry.shape != expected:
            rule = f"has shape {list(entry.shape)}, its model says {list(expected)}"
            raise BadInput(Reason(field=entry.name, rule=rule))


def _parse_origin(index: CheckpointIndex, checkpoint: Path) -> HfOrigin | None:
    """Return the folder that a checkpoint was imported from; None where there was none.

    A checkpoint may come from anybody, and its names become files.

    Raises:
        BadInput: naming the entry that is no plain file name, or names a tensor twice.
    """
    data = index.extra.get("hf")
    if data is None:
        return None
    where = f"{checkpoint}: hf"
    origin = from_data(HfOrigin, data, where=where)
    for name in origin.texts:
        if name not in TEXT_FILES:
            rule = "is not a file that an import keeps"
            raise BadInput(
                Reason(
                    field=f"{where}.texts",
                    value=ascii(name),
                    rule=rule,
                    nearest=", ".join(TEXT_FILES),
                )
            )
    seen: set[str] = set()
    for file, entries in origin.files.items():
        if not _WEIGHT_FILE.fullmatch(file):
            rule = "is not the plain name of a safetensors file"
            raise BadInput(
                Reason(field=f"{where}.files", value=ascii(file), rule=rule, nearest=SINGLE_FILE)
            )
        for name, dtype in entries:
            field = f"{where}.files.{file}"
            if dtype not in _DTYPE_ORDER:
                legal = ", ".join(_DTYPE_ORDER)
                rule = f"{name} is of {dtype}; known are {legal}"
                raise BadInput(Reason(field=field, rule=rule))
            if name in seen:
                raise BadInput(Reason(field=field, rule=f"names {name} twice"))
            seen.add(name)
    return origin


def _stored_precision(index: CheckpointIndex, checkpoint: Path) -> Dtype:
    """Return the precision that a checkpoint was trained in, or unpacked to."""
    train = index.extra.get("train", {})
    field = "train.precision"
    name = train.get("precision", Dtype.FP32) if isinstance(train, dict) else train
    if "unpacked_to" in index.extra:
        field = "unpacked_to"
        name = index.extra[field]
    dtype = next((dtype for dtype in _DTYPE_NAMES if dtype.value == name), None)
    if dtype is None:
        rule = "is not a precision that files are written in"
        nearest = ", ".join(_DTYPE_NAMES)
        raise BadInput(
            Reason(field=f"{checkpoint}: {field}", value=str(name), rule=rule, nearest=nearest)
        )
    return dtype


def _map_imported(
    model: ModelSpec, origin: HfOrigin, checkpoint: Path
) -> dict[str, tuple[str, HfTensor]]:
    """Map the tensors that were imported to ours."""
    names = {name for entries in origin.files.values() for name, _ in entries}
    duplicates = {
        hf_name: name for hf_name, name in duplicate_tensors(model).items() if hf_name in names
    }
    sources = _map_sources(match_names(model, names, checkpoint), duplicates)
    unknown = next(iter(sorted(names - sources.keys())), None)
    if unknown is not None:
        raise tensor_error(checkpoint, unknown, "is not a tensor of this model")
    return sources


def _map_sources(
    table: NameTable, duplicates: Mapping[str, str]
) -> dict[str, tuple[str, HfTensor]]:
    sources = {
        hf_tensor.name: (name, hf_tensor)
        for name, hf_tensors in table.items()
        for hf_tensor in hf_tensors
    }
    for hf_name, name in duplicates.items():
        sources[hf_name] = (name, table[name][0])
    return sources


def _original_headers(
    origin: HfOrigin, sources: Mapping[str, tuple[str, HfTensor]]
) -> dict[str, list[TensorHeader]]:
    """Return the headers of the files that were imported."""
    return {
        file: [
            TensorHeader(name=hf_name, dtype=dtype, shape=sources[hf_name][1].shape)
            for hf_name, dtype in entries
        ]
        for file, entries in origin.files.items()
    }


def _build_headers(
    model: ModelSpec, sources: Mapping[str, tuple[str, HfTensor]], dtype: Dtype
) -> list[TensorHeader]:
    """Return the headers of all tensors; what is not trained stays in fp32."""
    trained = {tensor.name for tensor in list_model_tensors(model) if tensor.trained}
    return [
        TensorHeader(
            name=hf_name,
            dtype=_DTYPE_NAMES[dtype] if name in trained else "F32",
            shape=hf_tensor.shape,
        )
        for hf_name, (name, hf_tensor) in sources.items()
    ]


def run_export(plan: ExportPlan, out: Path, on_progress: ReportProgress) -> None:
    """Write the folder `out`: all of it, or nothing.

    Raises:
        BadInput: when it holds something, or the disk is full.
    """
    with write_folder(out, plan.nbytes) as working:
        for entry in plan.index.files:
            verify_file(plan.checkpoint, entry)
        for file, headers in plan.files.items():
            # A reader for each file maps no more than the file needs.
            with PayloadReader(plan.checkpoint) as reader:
                tensors = _read_tensors(plan, headers, reader, on_progress)
                write_tensors(working / file, headers, tensors, {"format": "pt"})
        for name, text in plan.texts.items():
            write_text(working / name, text)
        for name, path in plan.copies.items():
            shutil.copyfile(path, working / name)


@contextmanager
def write_folder(out: Path, nbytes: int) -> Iterator[Path]:
    """Give a folder to write in, which becomes `out` when all of it is there.

    Raises:
        BadInput: when `out` holds something, or the disk is full.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        rule = "exists and is not empty"
        raise BadInput(Reason(field=str(out), rule=rule, nearest="a new folder"))
    require_space(out.parent, nbytes)
    working = out.with_name(f".{out.name}.part")
    try:
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        yield working
        fsync_directory(working)
        if out.exists():
            out.rmdir()
        working.rename(out)
    except OSError as error:
        raise write_error(out, error, nbytes) from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _read_tensors(
    plan: ExportPlan,
    headers: Sequence[TensorHeader],
    reader: PayloadReader,
    on_progress: ReportProgress,
) -> Iterator[torch.Tensor]:
    entries = {entry.name: entry for entry in plan.index.tensors}
    for header in headers:
        name, hf_tensor = plan.sources[header.name]
        entry = entries.get(name)
        if entry is None:
            raise BadInput(Reason(field=name, rule=f"is not in the checkpoint {plan.checkpoint}"))
        lead = len(hf_tensor.index)
        part_shape = entry.shape[lead:]
        offsets = (*hf_tensor.index, *(0,) * len(part_shape))
        box = read_tensor_box(reader, entry, offsets, (*(1,) * lead, *part_shape))
        yield hf_tensor.to_hf(box.view(part_shape)).to(SAFETENSORS_DTYPES[header.dtype])
        on_progress(header.nbytes)


def _split_into_files(headers: Sequence[TensorHeader]) -> dict[str, list[TensorHeader]]:
    """Split tensors into files of at most _FILE_BYTES or one tensor, named as transformers does."""
    files: list[list[TensorHeader]] = [[]]
    for header in headers:
        file_bytes = sum(member.nbytes for member in files[-1])
        if files[-1] and file_bytes + header.nbytes > _FILE_BYTES:
            files.append([])
        files[-1].append(header)
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": members
        for number, members in enumerate(files, 1)
    }


def _index_text(files: HeadersByFile) -> str:
    weight_map = {header.name: file for file, headers in files.items() for header in headers}
    total = sum(header.nbytes for headers in files.values() for header in headers)
    data = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _sort_headers(files: HeadersByFile) -> HeadersByFile:
    def position(header: TensorHeader) -> tuple[int, str]:
        return _DTYPE_ORDER.index(header.dtype), header.name

    return {file: tuple(sorted(headers, key=position)) for file, headers in files.items()}
