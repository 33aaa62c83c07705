"""Print how the scripts and configurations of a folder of checkouts are read, a line a file.

`make reading-table MATERIAL=DIR LIST=FILE` reads the files that LIST names, one a line, relative to
DIR; without LIST every script and YAML file below DIR that speaks of a parallel size. Nothing of
them is kept. A file that asks for a count of devices gets 64. What a refusal says to add is added,
and the file read again: a refusal that comes again after what it asked for asks for nothing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from moewright.api.launch_scripts import ScriptPlan, read_flags
from moewright.codec import format_layout
from moewright.spec.errors import BadInput, Reason

_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml")
_MARK = re.compile(r"model[-_]parallel[-_]size")
_DEVICE = "H100"
_COUNT = 64
_MOST_BYTES = 200_000
# Notes that say what a plan leaves out or takes otherwise.
_REMARKS = ("not read:", "is left out", "is not read", "is of ", "planned as", "counts")


# What stands for "..." in what a refusal says to add, by a word of the name that it is for.
_TYPICAL = (
    ("num-layers|num_layers", "32"),
    ("hidden-size|hidden_size", "4096"),
    ("num-attention-heads|num_attention_heads", "32"),
    ("seq-length|seq_length|max_length", "4096"),
    ("global-batch|global_batch", "512"),
    ("vocab", "128000"),
    ("parallel-size|parallel_size|micro-batch|micro_batch", "1"),
)
_OTHERWISE = "8"
_MODEL = "meta-llama/Meta-Llama-3-8B"
_MOST_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Additions:
    """What is given beside a file: the devices, a model where one is asked for, and --set."""

    devices: str = _DEVICE
    model: str = ""
    settings: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def add(self, reason: Reason) -> Additions | None:
        """Return these with what a refusal asks for; None where it asks for nothing."""
        if reason.field == "--on":
            return replace(self, devices=f"{_COUNT}x{_DEVICE}")
        words = _split(reason.nearest)
        option = reason.field.rpartition(" ")[2] if ": --" in reason.field else reason.field
        option = option.partition(" ")[0]
        if words[:1] == ["--script-args"]:
            return self._add_argument(reason)
        if words[:1] == ["--set"]:
            told = (word for word in words if word != "--set")
            return replace(self, settings=(*self.settings, *map(_fill, told)))
        if words[:1] in (["--model"], ["estimate"]):
            return replace(self, model=_MODEL)
        if option.startswith("--") and words[:1] == [option]:
            return None
        if words and words[0].startswith("--") and option.startswith("--"):
            if len(words) > 1:  # an option that goes with it
                return replace(self, settings=(*self.settings, "=".join(words[:2])))
            return None
        is_name = option.startswith("--") or "." in option
        if len(words) == 1 and is_name:
            return replace(self, settings=(*self.settings, f"{option}={words[0]}"))
        return None

    def _add_argument(self, reason: Reason) -> Additions | None:
        """Return these with the argument of a script that a refusal asks for by its place."""
        place = re.search(r"argument (\d+)", reason.rule)
        if place is None:
            return None
        count = int(place[1])
        arguments = [*self.arguments, *[_OTHERWISE] * (count - len(self.arguments))]
        arguments[count - 1] = _fill(f"{reason.field}=...").partition("=")[2]
        return replace(self, arguments=tuple(arguments))

    def __str__(self) -> str:
        given = f'--script-args "{" ".join(self.arguments)}"' if self.arguments else ""
        model = f"--model {self.model}" if self.model else ""
        settings = (f"--set {setting}" for setting in self.settings)
        return " ".join(filter(None, (f"--on {self.devices}", model, given, *settings)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFile:
    """How a file was read: its outcome (planned, planned with a note, refused), and the words.

    `followed` are the lines of the refusals before the last answer, `added` what they asked for.
    """

    path: str
    outcome: str
    words: str
    followed: tuple[str, ...] = ()
    added: Additions = field(default_factory=Additions)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _fill(setting: str) -> str:
    """Return NAME=VALUE with a typical value in the place of three dots."""
    typical = (value for names, value in _TYPICAL if re.search(names, setting, re.IGNORECASE))
    return setting.replace("...", next(typical, _OTHERWISE))


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
    added = Additions()
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
            more = next(filter(None, map(added.add, refusal.reasons)), None)
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
