"""What a checkpoint of Megatron-LM holds beside tensors, read without executing its pickle.

common.pt is a pickle in a zip file, of settings and counts, in classes of many modules. The reader
here imports none of them: whatever the pickle names becomes an inert record.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from moewright.spec.errors import BadInput, Reason

COMMON_FILE = "common.pt"
_MAX_BYTES = 2**30


class _Anything:
    """A record in the place of whatever a pickle names; what is done to it does nothing."""

    def __new__(cls, *values: Any, **fields: Any) -> _Anything:
        return super().__new__(cls)

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.values = values

    def __call__(self, *values: Any) -> _Anything:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def append(self, value: Any) -> None:
        """Drop a value."""

    def extend(self, values: Any) -> None:
        """Drop values."""

    def add(self, value: Any) -> None:
        """Drop a value."""

    def __hash__(self) -> int:
        return id(self)


class _CommonReader(pickle.Unpickler):
    """A reader of a pickle that imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()


def read_common(folder: Path) -> Mapping[str, Any]:
    """Read what common.pt says in plain dictionaries, lists and numbers; {} without the file.

    Raises:
        BadInput: it is damaged.
    """
    path = folder / COMMON_FILE
    if not path.exists():
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if member.file_size > _MAX_BYTES:
                _refuse(path, "is longer than a gibibyte")
            with archive.open(member) as stream:
                common = _load(stream)
    except BadInput:
        raise
    except Exception as error:  # whatever bytes of a stranger make of an unpickler
        _refuse(path, f"cannot be read ({type(error).__name__}: {str(error)[:160]})")
    if not isinstance(common, dict):
        _refuse(path, "is no dictionary")
    return common


def _load(stream: IO[bytes]) -> Any:
    return _CommonReader(stream).load()


def _refuse(path: Path, rule: str) -> NoReturn:
    raise BadInput(Reason(field=str(path), rule=rule, nearest="a folder iter_*")) from None


def find_counts(common: Any, name: str) -> Iterator[int]:
    """Yield every whole number under a name, wherever it stands."""
    if isinstance(common, list | tuple):
        for value in common:
            yield from find_counts(value, name)
    if not isinstance(common, dict):
        return
    for key, value in common.items():
        if key == name and isinstance(value, int | float) and value == int(value):
            yield int(value)
        yield from find_counts(value, name)
