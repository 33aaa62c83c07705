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

from moewright.engine.hf.packed import PACKED, Box, Stored, misplaced, stand_for, unpacked
from moewright.spec.errors import BadInput, Reason

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """The tensors of a folder, by name, file after file."""

    path: Path
    tensors: dict[str, Stored]
    places: dict[str, str]  # files of the tensors as they are stored

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors in each file."""
        found: dict[str, list[str]] = {}
        for name, stored in self.tensors.items():
            found.setdefault(stored.file, []).append(name)
        return {file: tuple(names) for file, names in found.items()}


def is_folder(path: Path) -> bool:
    """Whether a folder holds weights as Hugging Face stores them."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


def open_folder(path: Path) -> HfFolder:
    """Read the headers of model.safetensors, or of the files that model.safetensors.index.json
    names.

    Raises BadInput naming the file that is missing or no safetensors, or the tensor that the index
    misplaces.
    """
    placed = _weight_map(path / INDEX) if (path / INDEX).is_file() else None
    tensors: dict[str, Stored] = {}
    for file in dict.fromkeys(placed.values()) if placed is not None else (SINGLE,):
        with open_weights(path / file) as stored:
            for name in stored.keys():  # noqa: SIM118
                if name in tensors:
                    raise misplaced(path, name, f"is in {tensors[name].file} and in {file}")
                if placed is not None and placed.get(name) != file:
                    raise misplaced(path, name, f"is in {file}, of which {INDEX} does not say so")
                part = stored.get_slice(name)
                tensors[name] = Stored(
                    file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())
                )
    for name, file in (placed or {}).items():
        if name not in tensors:
            raise misplaced(path, name, f"is missing in {file}, where {INDEX} places it")
    return HfFolder(
        path=path,
        tensors=dict(stand_for(path, tensors)),
        places={n: s.file for n, s in tensors.items()},
    )


def _weight_map(path: Path) -> dict[str, str]:
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


def open_weights(path: Path) -> Any:
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

    def tensor(self, name: str) -> torch.Tensor:
        return self.part(name, (slice(None),) * len(self._folder.tensors[name].shape))

    def part(self, name: str, box: Box) -> torch.Tensor:
        """Raises BadInput where a value is not finite: training from it would only end later."""
        stored = self._folder.tensors[name]
        part = (
            unpacked(name, stored, box, self._raw)
            if stored.dtype in PACKED
            else self._raw(name, box)
        )
        if not part.isfinite().all():
            raise misplaced(
                self._folder.path, name, f"holds values that are not finite, in {stored.file}"
            )
        return part

    def _raw(self, name: str, box: Box) -> torch.Tensor:
        part: torch.Tensor = self._at(self._folder.places[name]).get_slice(name)[box]
        return part

    def _at(self, wanted: str) -> Any:
        if self._file is None or wanted != self._name:
            self._close()
            self._name, self._file = wanted, open_weights(self._folder.path / wanted).__enter__()
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._name, self._file = "", None
