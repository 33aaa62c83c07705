"""Write requirements.lock: every package of a working set-up with its version and its hashes.

`make lock` runs it after constraints.txt has changed. A hash in a file of constraints has pip ask
for the hashes of everything, and an editable project has none. So the lock is a list of
requirements, which is installed first, and then the project alone (`make locked`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
# What builds the project, so that nothing is fetched for that without a hash.
_BUILD = ("hatchling", "editables")
_PYTHONS = ("3.11", "3.12")
_PLATFORMS = ("linux", "manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")
_HEAD = """\
# Every package of a working set-up, and of the build, with the hashes of its files for Python 3.11
# and 3.12 on Linux (x86-64); versions are those of constraints.txt. torch is its CPU build for
# Python 3.11, from a folder or an index that has it: the CUDA build needs packages that are not
# here. `make lock` writes this file, `make locked` installs from it.
"""


def main() -> None:
    """Ask pip which files it would install, and write their hashes."""
    hashes: dict[str, set[str]] = {}
    compiled = []
    for package in _ask_pip("-r", "constraints.txt", ".[dev,docs]", *_BUILD):
        hashes.setdefault(package.pin, set()).add(package.sha256)
        if not package.file.endswith("-none-any.whl"):
            compiled.append(package.pin)
    others = [pin for pin in compiled if not pin.startswith("torch==")]
    for python in _PYTHONS:
        options = ["--no-deps", "--only-binary=:all:", "--target", "unused"]
        options += [
            "--python-version",
            python,
            *(f"--platform={name}_x86_64" for name in _PLATFORMS),
        ]
        for package in _ask_pip(*options, *others):
            hashes[package.pin].add(package.sha256)
    LOCK.write_text(format_lock(hashes))


def format_lock(hashes: Mapping[str, Iterable[str]]) -> str:
    """Return the lock of pins with their hashes."""
    entries = (
        " \\\n    ".join((pin, *(f"--hash=sha256:{digest}" for digest in sorted(digests))))
        for pin, digests in sorted(hashes.items())
    )
    return _HEAD + "".join(f"{entry}\n" for entry in entries)


class _Package(NamedTuple):
    """A file that pip would install."""

    pin: str
    file: str
    sha256: str


def _ask_pip(*arguments: str) -> list[_Package]:
    """Return what pip would install into an empty environment; the project itself is left out."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command += ["--report", str(report), *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        items = json.loads(report.read_text())["install"]
    return [_read_item(item) for item in items if "archive_info" in item["download_info"]]


def _read_item(item: Mapping[str, Any]) -> _Package:
    metadata = item["metadata"]
    name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
    version = metadata["version"].partition("+")[0]  # a pin without a local part takes all builds
    return _Package(
        pin=f"{name}=={version}",
        file=item["download_info"]["url"].rpartition("/")[2],
        sha256=item["download_info"]["archive_info"]["hashes"]["sha256"],
    )


if __name__ == "__main__":
    main()
