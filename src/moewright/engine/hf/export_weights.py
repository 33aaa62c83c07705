"""A checkpoint of ours, written in any layout, becomes a Hugging Face folder.

One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from moewright.codec import FloatPolicy, from_data, parse_json, read_text
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    CheckpointIndex,
    PayloadReader,
    TensorEntry,
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
from moewright.engine.hf.candidates import HfTensor, list_model_tensors
from moewright.engine.hf.folder import INDEX_FILE, SINGLE_FILE, HfReader, open_hf_folder
from moewright.engine.hf.import_weights import DTYPE_ORDER, HfOrigin, ReportProgress, parse_origin
from moewright.engine.hf.names import (
    NameTable,
    beside_tensors,
    build_name_table,
    duplicate_tensors,
    family_name_table,
    find_nesting,
    join_rows,
    match_names,
)
from moewright.engine.hf.packed import PACKED_DTYPES, tensor_error
from moewright.families.weight_names import BESIDE_PREFIX
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype

# The bytes of a file at most, as transformers cuts them.
_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES: Mapping[Dtype, str] = MappingProxyType(
    {Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"}
)

HeadersByFile = Mapping[str, Sequence[TensorHeader]]
# What each tensor of the files is made of, row after row: a tensor of ours, and which part of it.
Sources = Mapping[str, tuple[tuple[str, HfTensor], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """Files that go beside weights: by name, what is copied from where, and what is written.

    `base` is the folder of Hugging Face that a run started from, if it was one.
    """

    copies: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    base: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """A checkpoint, and the files that it will be.

    `texts` are written and `copies` copied beside them. What lies beside the language model and is
    not in the checkpoint is read from `base`.
    """

    checkpoint: Path
    index: CheckpointIndex
    sources: Sources
    files: HeadersByFile
    texts: Mapping[str, str]
    copies: Mapping[str, Path] = field(default_factory=dict)
    base: Path | None = None

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
    config.json that `config` makes; so is one that was imported from packed weights, in bf16. Where
    it started from a folder that sees or hears too, it becomes such a folder. The `companions` lie
    beside weights that do not go back as they came.

    Raises:
        BadInput: for a model with a tensor that Hugging Face has no name for.
    """
    index = read_index(checkpoint)
    model = parse_stored_model(index, checkpoint)
    _check_shapes(index, model)
    origin = parse_origin(index, checkpoint)
    config_text = ""
    base = None
    if origin is not None:
        sources = _map_imported(model, origin, index, checkpoint)
        if find_nesting(sources):
            # What `config` writes describes a language model alone.
            config_text = origin.texts.get("config.json", "")
        if dtype is None:
            files = _original_headers(origin, sources)
            texts: dict[str, str] = {**origin.texts}
            if len(files) > 1 and INDEX_FILE not in texts:
                texts[INDEX_FILE] = _index_text(files)
            return ExportPlan(
                checkpoint=checkpoint,
                index=index,
                sources=sources,
                files=_sort_headers(files),
                texts=texts,
            )
    elif (nested := _map_nested_base(model, companions.base)) is not None:
        base = companions.base
        sources, config_text = nested
    else:
        mtp_duplicates = {
            hf_name: name
            for hf_name, name in duplicate_tensors(model).items()
            if hf_name.startswith("model.layers.")
        }
        sources = _map_sources(family_name_table(model), mtp_duplicates)
    if dtype is None:
        # Only now: a folder that goes back as it came needs no precision.
        dtype = _stored_precision(index, checkpoint)
    files = _split_into_files(_build_headers(model, sources, dtype))
    config_text = _set_dtype(config_text, dtype) if config_text else config(model, dtype)
    texts = {**companions.texts, "config.json": config_text}
    if len(files) > 1:
        texts[INDEX_FILE] = _index_text(files)
    return ExportPlan(
        checkpoint=checkpoint,
        index=index,
        sources=sources,
        files=_sort_headers(files),
        texts=texts,
        copies=companions.copies,
        base=base,
    )


def _map_nested_base(model: ModelSpec, base: Path | None) -> tuple[Sources, str] | None:
    """Return the sources of a folder like `base`, and its config.json.

    None where its language model is all of it, or where it is packed.
    """
    if base is None:
        return None
    folder = open_hf_folder(base)
    is_packed = any(stored.dtype in PACKED_DTYPES for stored in folder.tensors.values())
    if is_packed or find_nesting(folder.tensors) is None:
        return None
    shapes = {name: stored.shape for name, stored in folder.tensors.items()}
    table = dict(build_name_table(model, folder))
    table |= {tensor.name: parts for tensor, parts in beside_tensors(model, shapes)}
    return _map_sources(table, {}), read_text(base / "config.json")


def _set_dtype(config_text: str, dtype: Dtype) -> str:
    """Return a config.json that says this dtype of its weights, wherever it said one."""
    config = parse_json(config_text, where="config.json", floats=FloatPolicy.NON_FINITE)
    name = {Dtype.FP32: "float32", Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}[dtype]
    for table in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(table, dict):
            table.update({key: name for key in ("dtype", "torch_dtype") if key in table})
    config.setdefault("dtype", name)
    return json.dumps(config, indent=2) + "\n"


def _check_shapes(index: CheckpointIndex, model: ModelSpec) -> None:
    """Raise BadInput for a tensor whose shape is not that of the model."""
    shapes = {tensor.name: tensor.shape for tensor in list_model_tensors(model)}
    for entry in index.tensors:
        # Other entries, such as states of the optimizer, have no shape in a spec.
        expected = shapes.get(entry.name, entry.shape)
        if entry.shape != expected:
            rule = f"has shape {list(entry.shape)}, its model says {list(expected)}"
            raise BadInput(Reason(field=entry.name, rule=rule))


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
    model: ModelSpec, origin: HfOrigin, index: CheckpointIndex, checkpoint: Path
) -> Sources:
    """Map the tensors that were imported to ours."""
    names = [name for entries in origin.files.values() for name, _ in entries]
    stored = {tensor.name.removeprefix(BESIDE_PREFIX): tensor.shape for tensor in index.tensors}
    shapes = {name: origin.shapes.get(name, stored.get(name, ())) for name in names}
    duplicates = {
        hf_name: name
        for hf_name, name in duplicate_tensors(model, find_nesting(names)).items()
        if hf_name in shapes
    }
    table = dict(match_names(model, shapes, checkpoint))
    table |= {tensor.name: parts for tensor, parts in beside_tensors(model, shapes)}
    sources = _map_sources(table, duplicates)
    unknown = next(iter(sorted(shapes.keys() - sources.keys())), None)
    if unknown is not None:
        raise tensor_error(checkpoint, unknown, "is not a tensor of this model")
    return sources


def _map_sources(table: NameTable, duplicates: Mapping[str, str]) -> Sources:
    parts: dict[str, list[tuple[str, HfTensor]]] = {}
    for name, hf_tensors in table.items():
        for hf_tensor in hf_tensors:
            parts.setdefault(hf_tensor.name, []).append((name, hf_tensor))
    for hf_name, name in duplicates.items():
        parts[hf_name] = [(name, table[name][0])]
    return {hf_name: tuple(rows) for hf_name, rows in parts.items()}


def _original_headers(origin: HfOrigin, sources: Sources) -> dict[str, list[TensorHeader]]:
    """Return the headers of the files that were imported."""
    return {
        file: [
            TensorHeader(name=hf_name, dtype=dtype, shape=sources[hf_name][0][1].stored_shape)
            for hf_name, dtype in entries
        ]
        for file, entries in origin.files.items()
    }


def _build_headers(model: ModelSpec, sources: Sources, dtype: Dtype) -> list[TensorHeader]:
    """Return the headers of all tensors; states of routers stay as they are."""
    states = {
        tensor.name: tensor.dtype for tensor in list_model_tensors(model) if not tensor.trained
    }
    return [
        TensorHeader(
            name=hf_name,
            dtype=states.get(parts[0][0], _DTYPE_NAMES[dtype]),
            shape=parts[0][1].stored_shape,
        )
        for hf_name, parts in sources.items()
    ]


def run_export(plan: ExportPlan, out: Path, on_progress: ReportProgress) -> None:
    """Write the folder `out`: all of it, or nothing.

    Raises:
        BadInput: when it holds something, or the disk is full.
    """
    with write_folder(out, plan.nbytes) as working:
        # All of them first: parts of tensors are read without checksums.
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
    # Beside `out`, because a rename stays within one file system.
    working = out.with_name(f".{out.name}.part")
    try:
        # What an export that was killed has left.
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        yield working
        fsync_directory(working)
        if out.exists():
            # Not rmtree: what has come into it meanwhile stays.
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
        dtype = SAFETENSORS_DTYPES[header.dtype]
        rows = [
            _read_part(plan, reader, entries.get(name), name, hf_tensor).to(dtype)
            for name, hf_tensor in plan.sources[header.name]
        ]
        yield join_rows(rows)
        on_progress(header.nbytes)


def _read_part(
    plan: ExportPlan,
    reader: PayloadReader,
    entry: TensorEntry | None,
    name: str,
    hf_tensor: HfTensor,
) -> torch.Tensor:
    """Read a tensor of the files, or rows of it."""
    if entry is None and plan.base is not None and name.startswith(BESIDE_PREFIX):
        with HfReader(open_hf_folder(plan.base)) as base_reader:
            return base_reader.read(hf_tensor.name)
    if entry is None:
        raise BadInput(Reason(field=name, rule=f"is not in the checkpoint {plan.checkpoint}"))
    lead = len(hf_tensor.index)
    part_shape = entry.shape[lead:]
    offsets = (*hf_tensor.index, *(0,) * len(part_shape))
    box = read_tensor_box(reader, entry, offsets, (*(1,) * lead, *part_shape))
    return hf_tensor.to_hf(box.view(part_shape))


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
        return DTYPE_ORDER.index(header.dtype), header.name

    return {file: tuple(sorted(headers, key=position)) for file, headers in files.items()}
