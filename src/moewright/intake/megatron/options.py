"""Megatron-LM's command line as its own parser reads it: the table of all its options, their types
and defaults."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from moewright.codec import closest_match
from moewright.intake.megatron.bash import UNKNOWN_VALUE, Command
from moewright.intake.megatron.foreign_options import FOREIGN_OPTIONS
from moewright.spec.errors import BadInput, Reason

_LAUNCHER_SWITCHES = (
    "--standalone",
    "--no-python",
    "--module",
    "--use-env",
    "--use_env",
    "-m",
    "-u",
)
_LAUNCHER = re.compile(
    r"--(nnodes|nproc[-_]per[-_]node|node[-_]rank|master[-_]addr|master[-_]port|rdzv[-_]\w+|max[-_]restarts|"
    r"log[-_]dir|redirects|tee|monitor[-_]interval|start[-_]method|role|local[-_]addr|local[-_]ranks[-_]filter)"
)
_PROGRAMS = ("torchrun", "python", "python3", "deepspeed")
_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOption:
    """A row of the table: how many values (0, 1, a number, + or *), of which type, out of what."""

    name: str
    dest: str
    value_count: str
    type: str
    choices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """A training command: ranks (0 where only running tells), what is exported, and the options
    with their values."""

    nodes: int
    ranks_per_node: int
    exported: Mapping[str, str]
    options: Mapping[str, tuple[str, ...]]
    foreign_options: Mapping[
        str, tuple[str, ...]
    ]  # options that its parser has not, with the values that stand behind them
    notes: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def option_table() -> Mapping[str, MegatronOption]:
    """Every long option of Megatron-LM's own parser at d98e8a64 (2026-08-22)."""
    text = (
        resources.files("moewright.intake.megatron")
        .joinpath("data/megatron_flags.csv")
        .read_text(encoding="utf-8")
    )
    return {
        row["flag"]: MegatronOption(
            name=row["flag"],
            dest=row["dest"],
            value_count=row["nargs"] or "1",
            type=row["type"],
            choices=tuple(choice.rpartition(".")[2] for choice in row["choices"].split()),
        )
        for row in csv.DictReader(text.splitlines())
    }


def find_launch(commands: Sequence[Command]) -> LaunchCommand:
    """The command that trains, out of all commands of a script; BadInput when there is none."""
    for command in commands:
        words = list(command.words)
        start = next(
            (at for at, word in enumerate(words) if word.rpartition("/")[2] in _PROGRAMS), None
        )
        if start is None or words[0] in ("echo", "printf", "which"):
            continue
        if any(word.startswith("--") and word.partition("=")[0] in _KNOWING for word in words):
            return _launch(words[start + 1 :], dict(command.exported))
    rule = "no command here starts pretrain_gpt.py: torchrun or python with Megatron-LM's options"
    raise BadInput(Reason(field="script", rule=rule))


_KNOWING = (
    "--num-layers",
    "--tensor-model-parallel-size",
    "--micro-batch-size",
    "--seq-length",
    "--global-batch-size",
)


def _launch(words: list[str], exported: dict[str, str]) -> LaunchCommand:
    known = option_table()
    ranks: dict[str, str] = {}
    given: dict[str, tuple[str, ...]] = {}
    old: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    faults: list[Reason] = []
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        name, equals, value = word.partition("=")
        if not word.startswith("-") or _NEGATIVE.match(word):
            stray = _stray(word, words[at - 2] if at > 1 else "")
            if stray == "...":
                notes.append(
                    "`...` leaves options out: those it stands for are taken at their defaults"
                )
            elif stray:
                faults.append(
                    Reason(
                        field=stray[:60],
                        rule=f"stands behind {words[at - 2][:60]} and no option takes it",
                    )
                )
            continue
        if name in _LAUNCHER_SWITCHES:
            continue
        if (match := _LAUNCHER.fullmatch(name)) and name not in known:
            value, at = (value, at) if equals else (next(iter(words[at : at + 1]), ""), at + 1)
            ranks[match[1].replace("_", "-")] = value
            continue
        behind = _behind(words, at)
        if name in known:
            option = known[name]
            values = [value] if equals else behind
            taken = values if equals else _take(option, values)
            at += 0 if equals else len(taken)
            given[name] = tuple(taken)
            faults += _faults(option, taken)
        elif name in FOREIGN_OPTIONS or name.replace("_", "-") in FOREIGN_OPTIONS:
            name = name if name in FOREIGN_OPTIONS else name.replace("_", "-")
            values = [value] if equals else behind[: FOREIGN_OPTIONS[name].value_count]
            at += 0 if equals else len(values)
            old[name] = tuple(values)
        else:
            close = closest_match(name.replace("_", "-"), [*known, *FOREIGN_OPTIONS])
            faults.append(
                Reason(field=name[:60], rule="is no option of Megatron-LM", nearest=close)
            )
    if faults:
        raise BadInput(*faults)
    nodes, per_node = _ranks(ranks)
    return LaunchCommand(
        nodes=nodes,
        ranks_per_node=per_node,
        exported=exported,
        options=given,
        foreign_options=old,
        notes=tuple(notes),
    )


def _behind(words: list[str], at: int) -> list[str]:
    """The words up to the next option."""
    end = at
    while end < len(words) and (not words[end].startswith("--")) and words[end] != "...":
        end += 1
    return words[at:end]


def _stray(word: str, before: str) -> str:
    """What a word that no option takes may be: the trainer, a module's name, a variable without
    value."""
    bare = UNKNOWN_VALUE.sub("", word)
    if not bare or word.endswith(".py") or before == "-m" or "pretrain" in word:
        return ""
    return word


def _take(option: MegatronOption, behind: list[str]) -> list[str]:
    """The words that the option takes; variables without value take no place where values are
    optional."""
    if option.value_count in ("+", "*"):
        whole = [word for word in behind if UNKNOWN_VALUE.sub("", word)]
        return whole or behind[:1]
    return behind[: int(option.value_count)]


def _faults(option: MegatronOption, values: Sequence[str]) -> Iterator[Reason]:
    wanted = {"+": len(values) >= 1, "*": True}.get(
        option.value_count, str(len(values)) == option.value_count
    )
    if not wanted:
        count = {"+": "one or more values", "*": "values", "1": "a value", "0": "no value"}.get(
            option.value_count
        )
        yield Reason(field=option.name, rule=f"takes {count or f'{option.value_count} values'}")
        return
    for value in values:
        if UNKNOWN_VALUE.search(value):
            continue  # whoever needs it says so
        if option.choices and value not in option.choices:
            close = closest_match(value, option.choices) or option.choices[0]
            rule = (
                RETIRED_VALUES.get((option.name, value))
                or f"is one of {', '.join(option.choices[:12])}"
            )
            yield Reason(field=option.name, value=value[:60], rule=rule, nearest=close)
        elif option.type in ("int", "float") and not _reads(value, option.type):
            rule = "must be a whole number" if option.type == "int" else "must be a number"
            yield Reason(field=option.name, value=value[:60], rule=rule)


RETIRED_VALUES = {
    (
        "--dataloader-type",
        "dynamic",
    ): "pads no batches: pack documents (--reset-attention-mask --eod-mask-loss)",
}


def _reads(value: str, kind: str) -> bool:
    try:
        return (int(value) if kind == "int" else float(value)) is not None
    except ValueError:
        return False


def _ranks(ranks: Mapping[str, str]) -> tuple[int, int]:
    """Nodes and ranks of each; 0 where the script does not tell."""
    found = []
    for name, otherwise in (("nnodes", "1"), ("nproc-per-node", "")):
        value = ranks.get(name, otherwise)
        if (
            value
            and not value.isdigit()
            and not UNKNOWN_VALUE.search(value)
            and value not in ("gpu", "auto")
        ):
            rule = "must be a whole number: the layout does not change while training"
            raise BadInput(Reason(field=f"--{name}", value=value[:60], rule=rule))
        found.append(int(value) if value.isdigit() else 0)
    return found[0], found[1]
