"""Files as a revision of a git repository has them, written as git does: main:scripts/train.sh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from moewright.spec.errors import BadInput, Reason

_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A commit of the repository that the working folder lies in; `path` is "" for all of it."""

    text: str
    commit: str
    path: str


def find_revision(text: str) -> Revision | None:
    """Return the revision that a text names; None for a path that exists, and for anything else."""
    if not text or Path(text).exists():
        return None
    name, _, path = text.partition(":")
    if not name:
        return None
    try:
        commit = _run_git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^0"])
    except BadInput:
        return None
    return Revision(text=text, commit=commit.decode().strip(), path=path)


def find_root() -> Path:
    """Return the root of the repository that the working folder lies in.

    Raises:
        BadInput: there is none.
    """
    return Path(_run_git(["rev-parse", "--show-toplevel"]).decode().strip())


@contextmanager
def open_revision(revision: Revision) -> Iterator[Path]:
    """Give a folder with the files of a revision, which is gone afterwards.

    A path in it is that from the root of the repository. A symbolic link is a file that holds its
    target, so that none leads out of the folder. The index of the repository stays as it is.

    Raises:
        BadInput: git does not give the files.
    """
    with TemporaryDirectory(prefix="moewright-") as folder:
        where = ["-C", str(find_root()), "-c", "core.symlinks=false", "--work-tree", folder]
        _run_git([*where, "restore", "--worktree", "--source", revision.commit, "--", ":/"])
        yield Path(folder)


def _run_git(arguments: Sequence[str]) -> bytes:
    """Return what git prints.

    Raises:
        BadInput: there is no git, or it fails.
    """
    try:
        return subprocess.run(
            ["git", *arguments], check=True, capture_output=True, timeout=_TIMEOUT_S
        ).stdout
    except FileNotFoundError:
        rule = "is not installed here; give two files"
    except subprocess.TimeoutExpired:
        rule = f"does not answer within {_TIMEOUT_S} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines() or ["fails"]
        rule = f"says: {lines[0]}"
    raise BadInput(Reason(field="git", rule=rule))
