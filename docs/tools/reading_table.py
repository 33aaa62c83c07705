"""Print how the scripts and configurations of a folder of checkouts are read, a line a file.

`make reading-table MATERIAL=DIR LIST=FILE` reads the files that LIST names, one a line, relative to
DIR; without LIST every script and YAML file below DIR that speaks of a parallel size. Nothing of
them is kept. What a refusal says to add is added, a typical value where it leaves that open, and
the file read again: a refusal that comes again after what it asked for asks for nothing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moewright.api.launch_scripts import ScriptPlan, read_flags
from moewright.api.script_requests import ScriptAdditions
from moewright.codec import format_layout
from moewright.spec.errors import BadInput

_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml")
_MARK = re.compile(r"model[-_]parallel[-_]size")
_DEVICE = "H100"
_MOST_BYTES = 200_000
# Notes that say what a plan leaves out or takes otherwise.
_REMARKS = ("not read:", "is left out", "is not read", "is of ", "planned as", "counts")
_MOST_STEPS = 16
_NO_ADDITIONS = ScriptAdditions(devices=_DEVICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFile:
    """How a file was read: its outcome (planned, planned with a note, refused), and the words.

    `followed` are the lines of the refusals before the last answer, `added` what they asked for.
    """

    path: str
    outcome: str
    words: str
    followed: tuple[str, ...] = ()
    added: ScriptAdditions = _NO_ADDITIONS


def list_material(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that speak of a parallel size."""
    for path in sorted(folder.rglob("*")):
        is_text = path.suffix in _SUFFIXES and path.is_file()
        if not is_text or path.stat().st_size > _MOST_BYTES:
            continue
        if _MARK.search(path.read_text(encoding="utf-8", errors="replace")):
            yield path


def read_file(path: Path, name: str) -> ReadFile:
    """Read a file as `estimate --from-flags` does, on H100, with what its refusals ask for."""
    added = _NO_ADDITIONS
    followed: list[str] = []
    while True:
        try:
            script = read_flags(
                path,
                on=added.devices,
                model=added.model,
                arguments=shlex.join(added.arguments),
                overrides=added.settings,
            )
        except BadInput as refusal:
            line = str(refusal)
            more = next(filter(None, map(added.follow, refusal.reasons)), None)
            is_again = line in followed
            if more is None or is_again or len(followed) == _MOST_STEPS:
                outcome = "refused again" if is_again else "refused"
                return ReadFile(
                    path=name, outcome=outcome, words=line, followed=tuple(followed), added=added
                )
            followed.append(line)
            added = more
            continue
        remarks = [note for note in script.notes if any(word in note for word in _REMARKS)]
        return ReadFile(
            path=name,
            outcome="planned with a note" if remarks else "planned",
            words="; ".join((_describe(script), *remarks)),
            followed=tuple(followed),
            added=added,
        )


def _describe(script: ScriptPlan) -> str:
    plan = script.plan
    workload = plan.workload
    return (
        f"{plan.model.name} {plan.layout.world_size} ranks {format_layout(plan.layout)} "
        f"seq={workload.seq_len} batch={workload.global_batch} {workload.precision} "
        f"zero={plan.layout.zero} {workload.trainer.attention_backend}"
    )


def main(folder: Path, names: Path | None) -> None:
    """Print the table, and how many files have which outcome."""
    paths = list_material(folder)
    if names is not None:
        paths = (folder / line for line in names.read_text(encoding="utf-8").splitlines())
    counts: dict[str, int] = {}
    for path in paths:
        row = read_file(path, str(path.relative_to(folder)))
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
        first = row.followed[0] if row.followed else row.words
        print(f"| {row.path} | {row.outcome} | {first} |")
        if row.followed:
            for line in row.followed[1:]:
                print(f"|  | then | {line} |")
            print(f"|  | with {row.added} | {row.words} |")
    print(counts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
