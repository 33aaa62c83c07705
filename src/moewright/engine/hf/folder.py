"""A Hugging Face folder on disk: which tensor lies in which safetensors file, and reading them.

Packed tensors are read as what they stand for (hf.packed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.codec import read_json_data
from moewright.codec.files import as_table
from moewright.engine.hf.packed import (
    PACKED_DTYPES,
    Box,
    StoredTensor,
    resolve_packed,
    tensor_error,
    unpack,
)
from moewright.spec.errors import BadInput, Reason

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SAMPLE_BYTES = 1 << 20  # with _SAMPLES reads a shard of any size in milliseconds
_SAMPLES = 64  # spread over the file


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """The tensors of a folder, by name, file after file.

    `stored_files` has the files of the tensors as they are stored, packed ones included.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    stored_files: dict[str, str]

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """The names of the tensors in each file."""
        names_by_file: dict[str, list[str]] = {}
        for name, stored in self.tensors.items():
            names_by_file.setdefault(stored.file, []).append(name)
        return {file: tuple(names) for file, names in names_by_file.items()}


def is_hf_folder(path: Path) -> bool:
    """Tell whether a folder holds weights as Hugging Face stores them."""
    return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()


def fingerprint_hf_folder(path: Path) -> str:
    """Return an identity of a folder's weights: names, sizes, and the bytes of small files.

    Of a file above 64 MiB that is 64 samples of a MiB, spread over it.
    """
    digest = hashlib.sha256()
    # Sorted, because a file system lists names in any order.
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with file.open("rb") as stream:
            for start in range(0, size, step):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def open_hf_folder(path: Path) -> HfFolder:
    """Read the headers of model.safetensors, or of the files that its index names.

    Raises:
        BadInput: naming the file that is missing or no safetensors, or the tensor that the index
            misplaces.
    """
    weight_map: dict[str, str] | None = None
    files = [SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        weight_map = _read_weight_map(path / INDEX_FILE)
        files = list(dict.fromkeys(weight_map.values()))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _read_header(path, file).items():
            if name in tensors:
                raise tensor_error(path, name, f"is in {tensors[name].file} and in {file}")
            if weight_map is not None and weight_map.get(name) != file:
                raise tensor_error(
                    path, name, f"is in {file}, of which {INDEX_FILE} does not say so"
                )
            tensors[name] = stored
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            raise tensor_error(path, name, f"is missing in {file}, where {INDEX_FILE} places it")
    return HfFolder(
        path=path,
        tensors=dict(resolve_packed(path, tensors)),
        stored_files={name: stored.file for name, stored in tensors.items()},
    )


def _read_header(path: Path, file: str) -> dict[str, StoredTensor]:
    tensors = {}
    with open_safetensors(path / file) as opened:
        for name in list(opened.keys()):
            part = opened.get_slice(name)
            tensors[name] = StoredTensor(
                file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())
            )
    return tensors


def _read_weight_map(path: Path) -> dict[str, str]:
    data = read_json_data(path)
    weight_map = as_table(data).get("weight_map")
    # Many tensors lie in few files: each name of one is looked at once.
    is_legal = (
        isinstance(weight_map, dict)
        and all(isinstance(file, str) for file in weight_map.values())
        # No folders: an index may come from anybody.
        and all(Path(file).name == file for file in set(weight_map.values()))
    )
    if not is_legal or not weight_map:
        rule = "needs a weight_map from tensors to files beside it"
        raise BadInput(Reason(field=str(path), rule=rule))
    return weight_map


def open_safetensors(path: Path) -> Any:
    """Return the safetensors file at `path`, to be used as a context; BadInput when it is none."""
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="no such file"))
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise BadInput(Reason(field=str(path), rule=f"is no safetensors file: {error}")) from None


class HfReader:
    """A reader of the tensors of a folder.

    One file is open at a time, so that no more than one lies in memory. `note` is called with each
    piece before it is read.
    """

    def __init__(self, folder: HfFolder, note: Callable[[str], None] = lambda piece: None) -> None:
        self._folder = folder
        self._note = note
        self._file_name = ""
        self._file: Any = None

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, in its own dtype, or in fp32 where it is packed."""
        return self.read_slice(name, (slice(None),) * len(self._folder.tensors[name].shape))

    def read_slice(self, name: str, box: Box) -> torch.Tensor:
        """Read a box of a tensor.

        Raises:
            BadInput: where a value is not finite: training from it would only end later.
        """
        stored = self._folder.tensors[name]
        if stored.dtype in PACKED_DTYPES:
            part = unpack(name, stored, box, self._read_stored)
        else:
            part = self._read_stored(name, box)
        if not part.isfinite().all():
            rule = f"holds values that are not finite, in {stored.file}"
            raise tensor_error(self._folder.path, name, rule)
        return part

    def _read_stored(self, name: str, box: Box) -> torch.Tensor:
        self._note(f"reads {name}")
        file = self._open(self._folder.stored_files[name])
        part: torch.Tensor = file.get_slice(name)[box]
        return part

    def _open(self, file_name: str) -> Any:
        if self._file is None or file_name != self._file_name:
            self._close()
            self._file = open_safetensors(self._folder.path / file_name).__enter__()
            self._file_name = file_name
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._file = None
        self._file_name = ""
