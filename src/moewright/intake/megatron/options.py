"""The options of Megatron-LM's own parser, and those of a launch command that were read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from moewright.intake.megatron.packaged_tables import read_rows
from moewright.intake.megatron.unknown import UNKNOWN_VALUE, UnknownValue, find_unknown
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.units import whole_number

# A whole number as YAML and some parsers have it.
WHOLE_NUMBER = re.compile(r"-?\d+\.0*|\d+e\+?\d")


class Arguments:
    """A command's options; it remembers which were read, so that the others can be named.

    `is_planned` tells which options may bear on a plan: those without a value yet are asked for
    together.

    The values were checked against the parser's types before (launch.find_launch). To read a value
    that is only known when the script runs raises BadInput.
    """

    def __init__(
        self,
        options: Mapping[str, tuple[str, ...]],
        is_planned: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.options = options
        self.is_planned = is_planned
        self.read_names: set[str] = set()

    def extend(self, options: Mapping[str, tuple[str, ...]]) -> None:
        """Add options that a file says which the command names."""
        self.options = {**self.options, **options}

    def has(self, name: str) -> bool:
        self.read_names.add(name)
        return name in self.options

    def ignore(self, *names: str) -> None:
        """Count options as read that change nothing by themselves."""
        self.read_names.update(names)

    def refuse_unplanned(self, meanings: Mapping[str, str]) -> None:
        """Refuse the options in `meanings`, which says what each asks for.

        Raises:
            BadInput: one of them is there.
        """
        for name, meaning in meanings.items():
            if self.has(name):
                raise BadInput(Reason(field=name, rule=f"{meaning} cannot be planned here"))

    def values(self, name: str, *default: str) -> tuple[str, ...]:
        """Return all values of an option.

        Raises:
            BadInput: one of them is only known when the script runs.
        """
        if not self.has(name):
            return default
        if any(map(find_unknown, self.options[name])):
            raise BadInput(self._ask_values(name))
        return self.options[name]

    def _ask_values(self, first: str) -> Reason:
        """Return the Reason that asks for the values of all options that bear on a plan.

        `first` is the option that is read; where its value depends on something, it is asked alone.
        """
        unknown = {
            name: value
            for name, values in self.options.items()
            if (value := next(filter(None, map(find_unknown, values)), None)) is not None
        }
        reason = ask_value(first, unknown[first])
        others = dict.fromkeys(
            value.name
            for name, value in unknown.items()
            if _is_variable(value) and self.is_planned(name)
        )
        if not _is_variable(unknown[first]) or len(others) < 2:
            return reason
        names = list(dict.fromkeys((unknown[first].name, *others)))
        rule = f"takes the value of {names[0]}, which only running the script tells"
        rule += f"; so do others: {', '.join(names[1:])}"
        nearest = " ".join(f"--set {name}=..." for name in names)
        return Reason(field=first, rule=rule, nearest=nearest)

    def text(self, name: str, default: str = "") -> str:
        return next(iter(self.values(name)), default)

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.text(name)) if self.has(name) else default

    def size(self, name: str, default: int = 1) -> int:
        """Return a whole number from 1.

        Raises:
            BadInput: it is smaller.
        """
        size = self.integer(name, default)
        if size < 1:
            raise BadInput(
                Reason(field=name, value=str(size), rule="must be at least 1", nearest="1")
            )
        return size

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.text(name)) if self.has(name) else default

    @property
    def unread_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.options if name not in self.read_names)


def _is_variable(unknown: UnknownValue) -> bool:
    """Whether a value is that of a variable which nothing sets, and no argument of a script."""
    return bool(unknown.name) and not unknown.origin and not unknown.name.isdecimal()


def ask_missing(name: str, typical: str = "...") -> BadInput:
    """Return the refusal of a command without an option that has no default."""
    rule = "is missing, and Megatron-LM has no default for it"
    return BadInput(Reason(field=name, rule=rule, nearest=f"--set {name}={typical}"))


def ask_value(name: str, unknown: UnknownValue) -> Reason:
    """Return the Reason that asks for the value of an option which only running tells."""
    nearest = f"--set {unknown.name or name}=..."
    if not unknown.origin and unknown.name.isdecimal():
        rule = f"is argument {unknown.name} of the script, which is not given"
        return Reason(field=name, rule=rule, nearest='--script-args "..."')
    if not unknown.origin:
        rule = f"takes the value of {unknown.name}, which only running the script tells"
        return Reason(field=name, rule=rule, nearest=nearest)
    values = dict.fromkeys(word for word in unknown.words if not word.startswith("--"))
    either = f"is {' or '.join(list(values)[:6])}: it " if values else ""
    rule = f"{either}depends on {unknown.origin}, which only running tells"
    return Reason(field=name, rule=rule, nearest=nearest)


# What to do instead of values that the parser does not take (any more).
_VALUE_RULES = {
    ("--optimizer", "ademamix"): (
        "keeps two first moments and a second, 4 bytes a number more than adam, which is the "
        "nearest that is planned here"
    ),
    ("--dataloader-type", "dynamic"): (
        "pads no batches: pack documents (--reset-attention-mask --eod-mask-loss)"
    ),
}
# What stands for a value that a user of a template fills in.
_PLACEHOLDER = re.compile(r"<+\w[\w -]*>+|\{\{.*\}\}|^\?{3}$|^(TODO|FIXME|XXX+)$")
_COUNT_RULES = {"+": "one or more values", "*": "values", "1": "a value", "0": "no value"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOption:
    """A long option: how many values it takes (0, 1, another number, + or *), of which type.

    `dest` is the name of the argument that it sets, and `clears` tells that it sets it to false;
    `choices` are its legal values, () for any; `default` is the argument's as Python prints it.
    """

    name: str
    dest: str
    value_count: str
    type: str
    choices: tuple[str, ...]
    default: str = ""
    clears: bool = False


@cache
def option_table() -> Mapping[str, MegatronOption]:
    """Return every long option of Megatron-LM's parser at d98e8a64 (2026-08-22), by name."""
    options = {
        row["flag"]: MegatronOption(
            name=row["flag"],
            dest=row["dest"],
            value_count=row["nargs"] or "1",
            type=row["type"],
            choices=tuple(choice.rpartition(".")[2] for choice in row["choices"].split()),
            default=row["default"],
            clears=_clears(row["flag"], row["kind"]),
        )
        for row in read_rows("megatron_flags.csv")
    }
    return MappingProxyType(options)  # one for all callers


@cache
def list_former_defaults() -> Mapping[str, tuple[str, ...]]:
    """Return the defaults of arguments that former releases had and today's parser has not."""
    rows = read_rows("former_arguments.csv")
    return MappingProxyType({row["name"]: tuple(row["defaults"].split("|")) for row in rows})


def _clears(flag: str, kind: str) -> bool:
    is_pair = kind == "BooleanOptionalAction"
    return kind == "StoreFalseAction" or (is_pair and flag.startswith("--no-"))


def take_values(option: MegatronOption, following: list[str]) -> list[str]:
    """Return which of the words that follow an option are its values.

    A variable without value is not one where values are optional.
    """
    if option.value_count in ("+", "*"):
        set_words = [word for word in following if UNKNOWN_VALUE.sub("", word)]
        return set_words or following[:1]
    return following[: int(option.value_count)]


def check_values(option: MegatronOption, values: Sequence[str]) -> Iterator[Reason]:
    """Yield a Reason for a wrong number of values and for each value that the parser refuses.

    Values that are only known when the script runs are left to whoever reads them.
    """
    if not _is_right_count(option.value_count, len(values)):
        count = _COUNT_RULES.get(option.value_count, f"{option.value_count} values")
        nearest = _ask_values(option) if option.value_count.isdigit() and values else ""
        yield Reason(field=option.name, rule=f"takes {count}", nearest=nearest)
        return
    for value in values:
        if UNKNOWN_VALUE.search(value):
            continue
        if option.choices and value not in option.choices:
            nearest = closest_match(value, option.choices) or option.choices[0]
            rule = f"is one of {', '.join(option.choices[:12])}"
            rule = _VALUE_RULES.get((option.name, value), rule)
            yield Reason(field=option.name, value=value[:60], rule=rule, nearest=nearest)
        elif option.type == "int" and not _converts(value, int):
            yield _ask_number(option, value, "must be a whole number")
        elif option.type == "float" and not _converts(value, float):
            yield _ask_number(option, value, "must be a number")


def _ask_number(option: MegatronOption, value: str, rule: str) -> Reason:
    if _PLACEHOLDER.search(value):
        rule = f"is a placeholder: it {rule}"
    nearest = _ask_values(option)
    return Reason(field=option.name, value=value[:60], rule=rule, nearest=nearest)


def _ask_values(option: MegatronOption) -> str:
    """Return what to add for an option: as many values as it takes, all of them together."""
    count = whole_number(option.value_count, otherwise=1)
    values = " ".join(["..."] * count)
    return f'--set {option.name}="{values}"' if count > 1 else f"--set {option.name}={values}"


def _is_right_count(legal: str, count: int) -> bool:
    if legal == "*":
        return True
    return count >= 1 if legal == "+" else str(count) == legal


def _converts(value: str, convert: type[int] | type[float]) -> bool:
    try:
        convert(value)
    except ValueError:
        return False
    return True
