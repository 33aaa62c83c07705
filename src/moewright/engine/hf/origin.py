"""The Hugging Face folder that a checkpoint was imported from, as the checkpoint says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moewright.codec import from_data
from moewright.engine.checkpoint import CheckpointIndex
from moewright.engine.hf.candidates import TABLE_DTYPE
from moewright.engine.hf.folder import SINGLE_FILE
from moewright.engine.hf.import_weights import TEXT_FILES
from moewright.spec.errors import BadInput, Reason
from moewright.spec.printable import Verbatim

# The order of dtypes in a file, as safetensors has it.
DTYPE_ORDER = (TABLE_DTYPE, "F32", "BF16", "F16")

# The names that a checkpoint may give files of weights: no folders, nothing hidden.
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfOrigin:
    """The folder that a checkpoint was imported from, as its `extra` describes it.

    `texts` are small files, word for word; `files` has the name and the dtype of each tensor of
    every file of weights, in order; `shapes` has those that names do not tell.
    """

    texts: Mapping[str, Verbatim]
    files: Mapping[str, tuple[tuple[str, str], ...]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def parse_origin(index: CheckpointIndex, checkpoint: Path) -> HfOrigin | None:
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
            if dtype not in DTYPE_ORDER:
                legal = ", ".join(DTYPE_ORDER)
                rule = f"{name} is of {dtype}; known are {legal}"
                raise BadInput(Reason(field=field, rule=rule))
            if name in seen:
                raise BadInput(Reason(field=field, rule=f"names {name} twice"))
            seen.add(name)
    return origin
