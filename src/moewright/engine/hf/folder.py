"""A Hugging Face folder on disk: which tensor lies in which safetensors file, and reading them, one
file at a time.

Packed tensors are read as what they stand for (hf_packed).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.engine.hf.packed import (
    PACKED_DTYPES,
    Box,
    StoredTensor,
    resolve_packed,
    tensor_error,
    unpack,
)
from moewright.spec.errors import BadInput, Reason

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """The tensors of a folder, by name, file after file."""

    path: Path
    tensors: dict[str, StoredTensor]
    stored_files: dict[str, str]  # files of the tensors as they are stored

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors in each file."""
        found: dict[str, list[str]] = {}
        for name, stored in self.tensors.items():
            found.setdefault(stored.file, []).append(name)
        return {file: tuple(names) for file, names in found.items()}


def is_hf_folder(path: Path) -> bool:
    """Whether a folder holds weights as Hugging Face stores them."""
    return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()


def open_hf_folder(path: Path) -> HfFolder:
    """Read the headers of model.safetensors, or of the files that model.safetensors.index.json
    names.

    Raises BadInput naming the file that is missing or no safetensors, or the tensor that the index
    misplaces.
    """
    placed = _read_weight_map(path / INDEX_FILE) if (path / INDEX_FILE).is_file() else None
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(placed.values()) if placed is not None else (SINGLE_FILE,):
        with open_safetensors(path / file) as stored:
            for name in stored.keys():  # noqa: SIM118
                if name in tensors:
                    raise tensor_error(path, name, f"is in {tensors[name].file} and in {file}")
                if placed is not None and placed.get(name) != file:
                    raise tensor_error(
                        path, name, f"is in {file}, of which {INDEX_FILE} does not say so"
                    )
                part = stored.get_slice(name)
                tensors[name] = StoredTensor(
                    file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())
                )
    for name, file in (placed or {}).items():
        if name not in tensors:
            raise tensor_error(path, name, f"is missing in {file}, where {INDEX_FILE} places it")
    return HfFolder(
        path=path,
        tensors=dict(resolve_packed(path, tensors)),
        stored_files={n: s.file for n, s in tensors.items()},
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            Reason(field=str(path), rule=f"cannot be read ({type(error).__name__})")
        ) from None
    placed = data.get("weight_map") if isinstance(data, dict) else None
    legal = isinstance(placed, dict) and all(
        isinstance(f, str) and Path(f).name == f for f in placed.values()
    )
    if not legal or not placed:
        raise BadInput(
            Reason(field=str(path), rule="needs a weight_map from tensors to files beside it")
        )
    return placed


def open_safetensors(path: Path) -> Any:
    """The safetensors file at `path`, to be used as a context; BadInput when it is none."""
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="no such file"))
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise BadInput(Reason(field=str(path), rule=f"is no safetensors file: {error}")) from None


class HfReader:
    """Reads tensors of a folder. One file is open at a time, so that no more than one lies in
    memory."""

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._name, self._file = "", None

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, name: str) -> torch.Tensor:
        return self.read_slice(name, (slice(None),) * len(self._folder.tensors[name].shape))

    def read_slice(self, name: str, box: Box) -> torch.Tensor:
        """Raises BadInput where a value is not finite: training from it would only end later."""
        stored = self._folder.tensors[name]
        part = (
            unpack(name, stored, box, self._read_stored)
            if stored.dtype in PACKED_DTYPES
            else self._read_stored(name, box)
        )
        if not part.isfinite().all():
            raise tensor_error(
                self._folder.path, name, f"holds values that are not finite, in {stored.file}"
            )
        return part

    def _read_stored(self, name: str, box: Box) -> torch.Tensor:
        part: torch.Tensor = self._open_file(self._folder.stored_files[name]).get_slice(name)[box]
        return part

    def _open_file(self, file_name: str) -> Any:
        if self._file is None or file_name != self._name:
            self._close()
            self._name, self._file = (
                file_name,
                open_safetensors(self._folder.path / file_name).__enter__(),
            )
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._name, self._file = "", None
