"""Print how the scripts and configurations of a folder of checkouts are read, a line a file.

`make reading-table MATERIAL=DIR LIST=FILE` reads the files that LIST names, one a line, relative to
DIR; without LIST every script and YAML file below DIR that speaks of a parallel size. Nothing of
them is kept. A file that asks for a count of devices gets 64; one that asks for a model gets none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moewright.api.launch_scripts import read_flags
from moewright.codec import format_layout
from moewright.spec.errors import BadInput

_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml")
_MARK = re.compile(r"model[-_]parallel[-_]size")
_DEVICE = "H100"
_COUNT = 64
_MOST_BYTES = 200_000
# Notes that say what a plan leaves out or takes otherwise.
_REMARKS = ("not read:", "is left out", "is not read", "is of ", "planned as", "counts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFile:
    """How a file was read: its outcome (planned, planned with a note, refused), and the words."""

    path: str
    outcome: str
    words: str


def list_material(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that speak of a parallel size."""
    for path in sorted(folder.rglob("*")):
        is_text = path.suffix in _SUFFIXES and path.is_file()
        if not is_text or path.stat().st_size > _MOST_BYTES:
            continue
        if _MARK.search(path.read_text(encoding="utf-8", errors="replace")):
            yield path


def read_file(path: Path, name: str) -> ReadFile:
    """Read a file as `estimate --from-flags` does, on H100."""
    for devices in (_DEVICE, f"{_COUNT}x{_DEVICE}"):
        try:
            script = read_flags(path, on=devices)
        except BadInput as refusal:
            if refusal.reasons[0].field == "--on" and devices == _DEVICE:
                continue
            return ReadFile(path=name, outcome="refused", words=str(refusal))
        plan = script.plan
        workload = plan.workload
        layout = format_layout(plan.layout)
        words = (
            f"{plan.model.name} {plan.layout.world_size} ranks {layout} seq={workload.seq_len} "
            f"batch={workload.global_batch} {workload.precision} zero={plan.layout.zero}"
        )
        remarks = [note for note in script.notes if any(word in note for word in _REMARKS)]
        outcome = "planned with a note" if remarks else "planned"
        return ReadFile(path=name, outcome=outcome, words="; ".join((words, *remarks)))
    return ReadFile(path=name, outcome="refused", words="needs another count of devices")


def main(folder: Path, names: Path | None) -> None:
    """Print the table, and how many files have which outcome."""
    paths = list_material(folder)
    if names is not None:
        paths = (folder / line for line in names.read_text(encoding="utf-8").split())
    counts: dict[str, int] = {}
    for path in paths:
        row = read_file(path, str(path.relative_to(folder)))
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
        print(f"| {row.path} | {row.outcome} | {row.words} |")
    print(counts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
