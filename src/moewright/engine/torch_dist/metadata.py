"""The metadata of a torch_dist checkpoint, whose pickle is read and never executed.

`.metadata` is a pickle of torch.distributed.checkpoint's records. The reader here knows their names
and builds inert records in their place; any other name that the pickle asks for is refused, so that
nothing of it is called. Payload files hold a tensor of torch.save for each chunk, which torch reads
with weights only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch

from moewright.codec.foreign import budget, read_apart
from moewright.engine.checkpoint.local_shard import find_tiling_fault
from moewright.spec.errors import BadInput, Reason

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 2**30  # it has a few hundred bytes a shard
_MAX_CHUNK_BYTES = 2**37  # 128 GiB, beyond what one rank writes of a tensor
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Megatron-LM keeps the plans of its ranks beside the rest.
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    # Where a checkpoint was written to, which nothing here reads.
    "pathlib": ("PosixPath", "PurePosixPath"),
}
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first_byte: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedTensor:
    """A tensor that its chunks cover exactly once.

    With `fragments`, it is cut into so many equal boxes along each dim, and what is stored has the
    shape [*fragments, values of a box]: older releases of the distributed optimizer wrote these.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    fragments: tuple[int, ...] = ()

    @property
    def fragment_shape(self) -> tuple[int, ...]:
        return tuple(size // count for size, count in zip(self.shape, self.fragments, strict=True))


class _Inert:
    """A record in the place of one of torch's: it keeps what a pickle says of it."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field by its name."""
        state = getattr(self, "state", {})
        if isinstance(state, dict):
            return state.get(name, default)
        return default


_KINDS = {
    (module, name): type(name, (_Inert,), {})
    for module, names in _RECORDS.items()
    for name in names
}


class _MetadataReader(pickle.Unpickler):
    """A reader of the metadata's pickle that finds inert records, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        kind = _KINDS.get((module, name))
        if kind is not None:
            return kind
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("refers to something outside of it")


@read_apart
def read_metadata(folder: Path) -> tuple[Mapping[str, ChunkedTensor], tuple[str, ...]]:
    """Return the tensors of a checkpoint by name, and the names of what is no tensor.

    Raises:
        BadInput: the metadata is missing, damaged, asks for anything but records of checkpoints, or
            describes chunks that do not cover a tensor once.
    """
    path = folder / METADATA_FILE
    refuse = partial(_refuse, path)
    try:
        nbytes = path.stat().st_size
        if nbytes > _MAX_METADATA_BYTES:
            refuse("is longer than a gibibyte")
        with budget(str(path), file_bytes=nbytes):
            return _parse_metadata(path.read_bytes(), folder, refuse)
    except BadInput:
        raise
    except OSError as error:
        refuse(f"cannot be read ({error.strerror})")
    except Exception as error:  # whatever bytes of a stranger make of an unpickler
        refuse(f"is no metadata of a checkpoint ({type(error).__name__}: {str(error)[:160]})")


def _parse_metadata(
    content: bytes, folder: Path, refuse: Callable[[str], NoReturn]
) -> tuple[Mapping[str, ChunkedTensor], tuple[str, ...]]:
    data = _MetadataReader(io.BytesIO(content)).load()
    described = data.get("state_dict_metadata")
    places = {
        (index.get("fqn"), _sizes(index.get("offset"))): info
        for index, info in data.get("storage_data").items()
    }
    flattened = data.get("mcore_data") or {}
    tensors: dict[str, ChunkedTensor] = {}
    others = []
    for name, entry in described.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            stored = _read_tensor(name, entry, places, folder, refuse)
            whole = _sizes(flattened.get(name, {}).get("nd_reformulated_orig_global_shape"))
            tensors[name] = _unflatten(stored, whole, refuse) if whole else stored
        else:
            others.append(str(name))
    return tensors, tuple(others)


def _refuse(path: Path, rule: str) -> NoReturn:
    nearest = "a folder iter_* that Megatron-LM wrote with --ckpt-format torch_dist"
    raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest)) from None


def _sizes(value: Any) -> tuple[int, ...]:
    if value is not None:
        return tuple(int(size) for size in value)
    return ()


def _read_tensor(
    name: str,
    entry: Any,
    places: Mapping[Any, Any],
    folder: Path,
    refuse: Callable[[str], NoReturn],
) -> ChunkedTensor:
    shape = _sizes(entry.get("size"))
    properties = getattr(entry.get("properties"), "state", None)
    dtype = None
    if isinstance(properties, dict):
        dtype = properties.get("dtype")
    elif properties:
        dtype = properties[0]
    if not isinstance(dtype, torch.dtype):
        refuse(f"{name}: says no dtype")
    chunks = []
    for chunk in entry.get("chunks"):
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        info = places.get((name, offsets)) or places.get((name, ()))
        if info is None:
            refuse(f"{name}: a chunk at {list(offsets)} lies in no file")
        if info.get("transform_descriptors"):
            refuse(f"{name}: is compressed or packed, which is not read")
        file = str(info.get("relative_path"))
        # No folders: what is read lies in the checkpoint.
        if PurePosixPath(file).name != file or file.startswith("."):
            refuse(f"{name}: lies in {file!a}, which is no plain file name")
        first_byte, nbytes = int(info.get("offset")), int(info.get("length"))
        if not 0 <= nbytes <= _MAX_CHUNK_BYTES or first_byte < 0:
            refuse(f"{name}: a chunk of {nbytes} bytes")
        if first_byte + nbytes > (folder / file).stat().st_size:
            refuse(f"{name}: ends beyond the end of {file}")
        chunks.append(
            StoredChunk(
                offsets=offsets, sizes=sizes, file=file, first_byte=first_byte, nbytes=nbytes
            )
        )
    _check_cover(name, shape, chunks, refuse)
    return ChunkedTensor(name=name, dtype=dtype, shape=shape, chunks=tuple(chunks))


def _unflatten(
    stored: ChunkedTensor, shape: tuple[int, ...], refuse: Callable[[str], NoReturn]
) -> ChunkedTensor:
    """Return a tensor of flattened boxes in its own shape."""
    *fragments, numel = stored.shape
    is_cut = len(fragments) == len(shape) and all(
        count > 0 and size % count == 0 for size, count in zip(shape, fragments, strict=True)
    )
    if not is_cut or prod(shape) != prod(fragments) * numel:
        refuse(f"{stored.name}: {list(stored.shape)} are no boxes of {list(shape)}")
    return replace(stored, shape=shape, fragments=tuple(fragments))


def _check_cover(
    name: str,
    shape: tuple[int, ...],
    chunks: list[StoredChunk],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Check that chunks lie inside a tensor, apart from each other, and fill it."""
    # A rank without a part of a tensor may write an empty chunk of it.
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks if prod(chunk.sizes)]
    if fault := find_tiling_fault(shape, boxes):
        refuse(f"{name}: {fault}")


class TorchDistReader:
    """A reader of the tensors of a checkpoint: boxes of them, chunk by chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self.others = read_metadata(folder)

    @read_apart
    def read_box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Read a box of a tensor in fp32.

        Raises:
            BadInput: a chunk is damaged.
        """
        stored = self.tensors[name]
        if not stored.fragments:
            return self._read_stored_box(stored, offsets, sizes)
        box = torch.empty(sizes)
        lengths = stored.fragment_shape
        touched = (
            range(first // length, -(-(first + size) // length))
            for first, size, length in zip(offsets, sizes, lengths, strict=True)
        )
        for index in product(*touched):
            flat = self._read_stored_box(stored, (*index, 0), (*(1,) * len(index), prod(lengths)))
            starts = tuple(number * length for number, length in zip(index, lengths, strict=True))
            common = _intersect(starts, lengths, offsets, sizes)
            box[_slices(*common, offsets)] = flat.reshape(lengths)[_slices(*common, starts)]
        return box

    def _read_stored_box(
        self, stored: ChunkedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Read a box of what is stored of a tensor."""
        box = torch.empty(sizes)  # filled whole: chunks that tile no tensor were refused
        for chunk in stored.chunks:
            firsts, ends = _intersect(chunk.offsets, chunk.sizes, offsets, sizes)
            if any(first >= end for first, end in zip(firsts, ends, strict=True)):
                continue
            value = self._read_chunk(stored, chunk)
            inside = _slices(firsts, ends, chunk.offsets)
            box[_slices(firsts, ends, offsets)] = value[inside].float()
        return box

    def _read_chunk(self, stored: ChunkedTensor, chunk: StoredChunk) -> torch.Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as stream:
                stream.seek(chunk.first_byte)
                content = io.BytesIO(stream.read(chunk.nbytes))
            with budget(str(path), file_bytes=chunk.nbytes):
                value = torch.load(content, map_location="cpu", weights_only=True)
        except BadInput:
            raise
        except Exception as error:  # whatever damaged bytes make of torch's reader
            _refuse(path, f"{stored.name}: is damaged ({type(error).__name__})")
        is_expected = isinstance(value, torch.Tensor) and value.numel() == prod(chunk.sizes)
        if not is_expected or value.dtype != stored.dtype:
            _refuse(path, f"{stored.name}: holds something else than {list(chunk.sizes)}")
        return value.detach().reshape(chunk.sizes)


def _intersect(
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where two boxes begin and end together."""
    firsts = tuple(map(max, starts, offsets))
    ends = tuple(
        min(start + length, other + size)
        for start, length, other, size in zip(starts, lengths, offsets, sizes, strict=True)
    )
    return firsts, ends


def _slices(
    firsts: tuple[int, ...], ends: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[slice, ...]:
    return tuple(
        slice(first - start, end - start)
        for first, end, start in zip(firsts, ends, origin, strict=True)
    )
