"""What a run has written to steps.jsonl since somebody looked last."""

from __future__ import annotations

import os
from pathlib import Path

# Of a file that is longer, only its end is read: a resumed run has the records of all its steps.
_MOST_BYTES = 1 << 22


class RecordTail:
    """The complete lines of a growing file, each given once; all anew where it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def read_lines(self) -> tuple[list[str], bool]:
        """Return the new lines, and whether they begin the file anew; none where it is not there.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            info = os.stat(self._path)
        except FileNotFoundError:
            return [], False
        is_new = info.st_ino != self._inode or info.st_size < self._offset
        if is_new:
            self._inode = info.st_ino
            self._offset = max(0, info.st_size - _MOST_BYTES)
        if info.st_size == self._offset:
            return [], is_new
        is_cut = is_new and self._offset > 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(info.st_size - self._offset)
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        lines = data[:complete].decode("utf-8", "replace").splitlines()
        return lines[1:] if is_cut else lines, is_new
