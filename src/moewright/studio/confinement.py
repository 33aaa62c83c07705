"""The walls of the studio's processes: no file is opened outside of one folder, by any code.

The walls are an audit hook of the interpreter, which sees each file that Python opens, lists,
renames or removes, whoever asks for it: a query, a dropped script that sources another one, or a
link in a folder that leads elsewhere. A hook cannot be taken away again, so it is for processes of
their own. Whether a file is there at all can still be seen.
"""

from __future__ import annotations

import errno
import mimetypes
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import moewright
from moewright.codec.foreign import BORDER_FILES

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM_FILES = ("/dev/null", "/dev/urandom", "/etc/ssl", "/etc/pki", "/usr/share/zoneinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """What the studio's processes may use: `root` to read, `folder` in it to write too.

    In `hub_cache` lie models that are named by their id; it lies elsewhere.
    """

    root: Path
    folder: Path
    hub_cache: Path
    is_read_only: bool = False

    def enter(self, *, unlinks: Iterable[Path] = ()) -> None:
        """Go to the root, and never leave it again; `unlinks` are files to remove in the end.

        The installation and the hub's cache can be read too. No process is started but of this
        interpreter. Who may only read writes nothing, and asks no other machine.
        """
        readable = [*_list_installation(), str(self.root), str(self.hub_cache)]
        writable = [*map(str, unlinks)]
        if not self.is_read_only:
            writable += [str(self.folder), str(self.hub_cache)]
        sys.dont_write_bytecode = True
        os.chdir(self.root)
        sys.addaudithook(_Walls(readable, writable, is_offline=self.is_read_only))


class _Walls:
    """The audit hook: it raises PermissionError for what leads outside."""

    def __init__(
        self, readable: Iterable[str], writable: Iterable[str], *, is_offline: bool
    ) -> None:
        self._writable = tuple(map(os.path.realpath, writable))
        self._readable = (*map(os.path.realpath, readable), *self._writable)
        self._checks: dict[str, Callable[..., None]] = {
            "open": self._check_open,
            "os.listdir": self._check_reading,
            "os.scandir": self._check_reading,
            "sqlite3.connect": self._check_database,
            "subprocess.Popen": _check_program,
            "os.system": _refuse,
            "os.exec": _refuse,
            "os.posix_spawn": _refuse,
        }
        if is_offline:
            self._checks["socket.connect"] = _refuse_connection
        for name in ("remove", "rmdir", "mkdir", "truncate", "chmod", "chown", "utime"):
            self._checks[f"os.{name}"] = self._check_writing
        for name in ("rename", "link", "symlink"):
            self._checks[f"os.{name}"] = self._check_two

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        check = self._checks.get(event)
        if check is not None:
            check(*arguments)

    def _check_open(self, path: Any, mode: str | None, flags: int) -> None:
        is_writing = flags & _WRITING or (mode is not None and set(mode) & set("wax+"))
        (self._check_writing if is_writing else self._check_reading)(path)

    def _check_reading(self, path: Any = ".", *_: object) -> None:
        _require_below(path, self._readable)

    def _check_writing(self, path: Any, *_: object) -> None:
        _require_below(path, self._writable)

    def _check_two(self, source: Any, target: Any, *_: object) -> None:
        self._check_writing(source)
        self._check_writing(target)

    def _check_database(self, address: Any, *_: object) -> None:
        self._check_reading(unquote(str(address).partition("?")[0].removeprefix("file://")))


def _require_below(path: Any, folders: tuple[str, ...]) -> None:
    # A file that is open already, ".", or what the border for foreign input asks for.
    if path is None or isinstance(path, int) or path in BORDER_FILES:
        return
    text = os.path.realpath(os.fsdecode(path))
    if not any(is_below(text, folder) for folder in folders):
        _refuse(text)


def is_below(path: str, folder: str) -> bool:
    """Return whether a real path is that of a folder, or of something in it."""
    return path == folder or path.startswith(os.path.join(folder, ""))


def _check_program(executable: Any, *_: object) -> None:
    if executable != sys.executable:
        _refuse(executable)


def _refuse(*names: object) -> None:
    name = str(names[0]) if names else ""
    raise PermissionError(errno.EACCES, "lies outside of --root", name)


def _refuse_connection(*_: object) -> None:
    raise PermissionError(errno.EACCES, "the studio is read-only: it asks no other machine")


def _list_installation() -> Iterator[str]:
    """Yield the folders of the interpreter and of its packages, and files that those read."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield from sysconfig.get_paths().values()
    yield from (*site.getsitepackages(), site.getusersitepackages())
    yield from map(os.fsdecode, moewright.__path__)
    # Not the folder that the program was started in, which Python may search for modules too.
    started_in = os.getcwd()
    yield from (path for path in sys.path if path and os.path.realpath(path) != started_in)
    yield from (*_SYSTEM_FILES, *map(os.fsdecode, mimetypes.knownfiles))
