"""The index of a checkpoint: strict JSON that says which box of which tensor lies in which file.

`index.json` is {"sha256": D, "body": B}, D being the digest of B as canonical JSON. A body holds
format, version, step, extra, files [{name, bytes, sha256}] and tensors [{name, dtype, shape, boxes
[[file number, offsets, sizes]]}]. Payload files are safetensors; a box is stored under `box_key`.
Nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, NoReturn

from moewright.engine.checkpoint.local_shard import (
    SAFETENSORS_DTYPES,
    Box,
    find_tiling_fault,
    is_legal_name,
)
from moewright.spec.errors import BadInput, Reason

INDEX_FILE = "index.json"
# What a refusal of a damaged checkpoint offers.
OLDER_CHECKPOINT = "an older checkpoint"
STEP_LIMIT = 10**8  # names of checkpoints have 8 digits
_FORMAT = "moewright-checkpoint"
_VERSION = 1
# Without separators, so that no name of a forged index leads out of the checkpoint.
_PAYLOAD = re.compile(r"rank-\d{5,}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A payload file, as the index lists it."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShard:
    """A box of a tensor that lies in one file."""

    box: Box
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A global tensor that its shards cover exactly once; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """The content of a checkpoint; `extra` is the caller's, plain JSON."""

    step: int
    extra: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]


def payload_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def box_key(name: str, offsets: tuple[int, ...]) -> str:
    """Return the name of a box in its file: no two boxes of a tensor have the same offsets."""
    return f"{name}@{','.join(map(str, offsets))}"


def serialize_index(index: CheckpointIndex) -> str:
    """Return the text of index.json.

    Raises:
        ValueError: when `extra` is not plain finite JSON.
        TypeError: likewise.
    """
    file_numbers = {entry.name: number for number, entry in enumerate(index.files)}
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": index.step,
        "extra": dict(index.extra),
        "files": [
            {"name": file.name, "bytes": file.nbytes, "sha256": file.sha256} for file in index.files
        ],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "boxes": [[file_numbers[shard.file], *shard.box] for shard in tensor.shards],
            }
            for tensor in index.tensors
        ],
    }
    text = _canonical(body)
    if json.loads(text)["extra"] != index.extra:
        raise ValueError("extra does not survive JSON: use plain lists and string keys")
    return f'{{"sha256":"{_digest(text)}","body":{text}}}\n'


def read_index(checkpoint: Path) -> CheckpointIndex:
    """Read the index of a committed checkpoint.

    Raises:
        BadInput: naming the file, for anything that is not one.
    """
    path = checkpoint / INDEX_FILE
    if not checkpoint.is_dir():
        fault = "is a file" if checkpoint.exists() else "does not exist"
        rule = f"{fault}; a checkpoint is a directory"
        raise BadInput(Reason(field=str(checkpoint), rule=rule, nearest="step-*"))
    # A link that leads nowhere is refused below, as no regular file.
    if not path.is_symlink() and not path.exists():
        content = ", ".join(sorted(entry.name for entry in checkpoint.iterdir())[:3]) or "nothing"
        rule = f"is not a checkpoint: it has no {INDEX_FILE} but {content}"
        raise BadInput(Reason(field=str(checkpoint), rule=rule, nearest="step-*"))
    try:
        if not S_ISREG(path.lstat().st_mode):
            _refuse(path, "is not a regular file")
        text = path.read_text("utf-8")
        data = json.loads(
            text, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
        )
    # json raises RecursionError for what is nested too deep.
    except (OSError, ValueError, RecursionError) as error:
        _refuse(path, f"cannot be read ({type(error).__name__}: {error})")
    try:
        return _parse_index(data)
    except _MalformedIndex as fault:
        _refuse(path, str(fault))


def _refuse(path: Path, rule: str) -> NoReturn:
    raise BadInput(Reason(field=str(path), rule=rule, nearest=OLDER_CHECKPOINT))


class _MalformedIndex(Exception):
    """An index that is not what this program writes; the message says why."""


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise _MalformedIndex(fault)


def _parse_index(data: Any) -> CheckpointIndex:
    outer = _check_keys(data, "index", {"sha256": str, "body": dict})
    text = _canonical(outer["body"])
    _require(outer["sha256"] == _digest(text), "is damaged: its checksum does not hold")
    keys = {
        "format": str,
        "version": int,
        "step": int,
        "extra": dict,
        "files": list,
        "tensors": list,
    }
    body = _check_keys(outer["body"], "body", keys)
    _require(body["format"] == _FORMAT, f"format is {body['format']!r}, not {_FORMAT!r}")
    _require(
        body["version"] == _VERSION,
        f"version is {body['version']}, and this program reads {_VERSION}",
    )
    _require(body["step"] >= 0, "step is negative")
    _require(body["step"] < STEP_LIMIT, f"step is not in 0..{STEP_LIMIT - 1}")
    files = tuple(_parse_file(entry) for entry in body["files"])
    _require(len({file.name for file in files}) == len(files), "names a file twice")
    tensors = tuple(_parse_tensor(entry, files) for entry in body["tensors"])
    _require(len({tensor.name for tensor in tensors}) == len(tensors), "names a tensor twice")
    return CheckpointIndex(step=body["step"], extra=body["extra"], files=files, tensors=tensors)


def _parse_file(data: Any) -> FileEntry:
    entry = _check_keys(data, "file", {"name": str, "bytes": int, "sha256": str})
    _require(
        _PAYLOAD.fullmatch(entry["name"]) is not None,
        f"file name {entry['name']!r} is not rank-N.safetensors",
    )
    _require(entry["bytes"] >= 0, f"{entry['name']} has a negative size")
    _require(_DIGEST.fullmatch(entry["sha256"]) is not None, f"{entry['name']} has no sha256")
    return FileEntry(name=entry["name"], nbytes=entry["bytes"], sha256=entry["sha256"])


def _parse_tensor(data: Any, files: tuple[FileEntry, ...]) -> TensorEntry:
    entry = _check_keys(data, "tensor", {"name": str, "dtype": str, "shape": list, "boxes": list})
    name = entry["name"]
    _require(is_legal_name(name), f"tensor name {name!r} is not legal")
    _require(entry["dtype"] in SAFETENSORS_DTYPES, f"{name}: dtype {entry['dtype']!r} is unknown")
    shape = _parse_sizes(entry["shape"], name)
    shards = []
    for box in entry["boxes"]:
        _require(
            isinstance(box, list) and len(box) == 3, f"{name}: a box is [file, offsets, sizes]"
        )
        (number,) = _parse_sizes([box[0]], name)
        offsets = _parse_sizes(box[1], name)
        sizes = _parse_sizes(box[2], name)
        _require(number < len(files), f"{name}: file {number} of {len(files)}")
        shards.append(StoredShard(box=(offsets, sizes), file=files[number].name))
    # A load relies on it: each element of each shard is read exactly once.
    fault = find_tiling_fault(shape, [shard.box for shard in shards])
    _require(not fault, f"{name}: {fault}")
    return TensorEntry(name=name, dtype=entry["dtype"], shape=shape, shards=tuple(shards))


def _check_keys(data: Any, name: str, types: Mapping[str, type]) -> dict[str, Any]:
    _require(
        isinstance(data, dict) and set(data) == set(types),
        f"{name} does not have the keys {', '.join(types)}",
    )
    for key, expected in types.items():
        # The very type: `isinstance` would take true for an int.
        _require(type(data[key]) is expected, f"{name}: {key} is not {expected.__name__}")
    return dict(data)


def _parse_sizes(data: Any, name: str) -> tuple[int, ...]:
    is_whole = isinstance(data, list) and all(type(value) is int and value >= 0 for value in data)
    _require(is_whole, f"{name}: {str(data)[:40]} is not a list of whole numbers")
    return tuple(data)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key is given twice")
    return data


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _canonical(body: Any) -> str:
    return json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
