"""A Hugging Face folder on disk: which tensor lies in which safetensors file, and reading them, one file at a time.

Experts packed as MXFP4 (OCP Microscaling Formats v1.0: blocks of 32 values of 4 bits and a power of two) are read as
the tensor that they stand for, "x" for "x_blocks" and "x_scales".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.spec.errors import BadInput, Reason

MXFP4 = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
_SCALE_BIAS = 127
_BLOCK = 32

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where a tensor lies; `dtype` is the safetensors name, or MXFP4."""

    file: str
    dtype: str
    shape: tuple[int, ...]


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
    """Read the headers of model.safetensors, or of the files that model.safetensors.index.json names.

    Raises BadInput naming the file that is missing or no safetensors, or the tensor that the index misplaces.
    """
    placed = _weight_map(path / INDEX) if (path / INDEX).is_file() else None
    tensors: dict[str, Stored] = {}
    for file in dict.fromkeys(placed.values()) if placed is not None else (SINGLE,):
        with open_weights(path / file) as stored:
            for name in stored.keys():  # noqa: SIM118
                if name in tensors:
                    raise _misplaced(path, name, f"is in {tensors[name].file} and in {file}")
                if placed is not None and placed.get(name) != file:
                    raise _misplaced(path, name, f"is in {file}, of which {INDEX} does not say so")
                part = stored.get_slice(name)
                tensors[name] = Stored(file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
    for name, file in (placed or {}).items():
        if name not in tensors:
            raise _misplaced(path, name, f"is missing in {file}, where {INDEX} places it")
    return HfFolder(path=path, tensors=dict(_unpacked(path, tensors)), places={n: s.file for n, s in tensors.items()})


def _unpacked(path: Path, tensors: dict[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Packed experts under the name and shape [E,K,N] that they stand for; blocks are [E,N,K/32,16], scales [E,N,K/32].

    Raises BadInput naming blocks without their scales.
    """
    for name, stored in tensors.items():
        whole = name.removesuffix(_BLOCKS)
        if whole == name:
            if not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
                yield name, stored
            continue
        scales = tensors.get(whole + _SCALES)
        packed = stored.dtype == "U8" and len(stored.shape) == 4 and stored.shape[3] == _BLOCK // 2
        if not packed or scales is None or scales.dtype != "U8" or scales.shape != stored.shape[:3]:
            raise _misplaced(path, name, f"needs {_BLOCK // 2} bytes a block, and a byte in {whole + _SCALES} for each")
        experts, rows, blocks, _ = stored.shape
        yield whole, Stored(file=stored.file, dtype=MXFP4, shape=(experts, blocks * _BLOCK, rows))


def _weight_map(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(Reason(field=str(path), rule=f"cannot be read ({type(error).__name__})")) from None
    placed = data.get("weight_map") if isinstance(data, dict) else None
    legal = isinstance(placed, dict) and all(isinstance(f, str) and Path(f).name == f for f in placed.values())
    if not legal or not placed:
        raise BadInput(Reason(field=str(path), rule="needs a weight_map from tensors to files beside it"))
    return placed


def _misplaced(path: Path, name: str, rule: str) -> BadInput:
    return BadInput(Reason(field=name, rule=f"{rule} ({path})"))


def open_weights(path: Path) -> Any:
    """The safetensors file at `path`, to be used as a context; BadInput when it is none."""
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="no such file"))
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise BadInput(Reason(field=str(path), rule=f"is no safetensors file: {error}")) from None


class HfReader:
    """Reads tensors of a folder. One file is open at a time, so that no more than one lies in memory."""

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._name, self._file = "", None

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def tensor(self, name: str) -> torch.Tensor:
        return self.part(name, (slice(None),) * len(self._folder.tensors[name].shape))

    def part(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        stored = self._folder.tensors[name]
        if stored.dtype == MXFP4:
            return self._unpack(name, box[:1])[(slice(None), *box[1:])]
        part: torch.Tensor = self._at(stored.file).get_slice(name)[box]
        return part

    def _unpack(self, name: str, experts: tuple[slice, ...]) -> torch.Tensor:
        """[experts,K,N] fp32; of two values in a byte the first is in the lower half."""
        at = self._folder.places[name + _BLOCKS], self._folder.places[name + _SCALES]
        packed = self._at(at[0]).get_slice(name + _BLOCKS)[experts]
        powers = self._at(at[1]).get_slice(name + _SCALES)[experts]
        known = torch.tensor([*_FP4, *(-value for value in _FP4)])
        values = torch.stack((known[(packed & 15).int()], known[(packed >> 4).int()]), -1).flatten(-2)
        scaled = torch.ldexp(values, powers.int()[..., None] - _SCALE_BIAS)
        return scaled.flatten(-2).transpose(1, 2)

    def _at(self, wanted: str) -> Any:
        if self._file is None or wanted != self._name:
            self._close()
            self._name, self._file = wanted, open_weights(self._folder.path / wanted).__enter__()
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._name, self._file = "", None
