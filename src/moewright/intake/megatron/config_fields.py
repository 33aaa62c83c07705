"""Options of Megatron-LM for the names that configurations use: its arguments and core's fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moewright.intake.megatron.options import (
    WHOLE_NUMBER,
    MegatronOption,
    check_values,
    option_table,
)
from moewright.intake.megatron.packaged_tables import read_rows
from moewright.intake.megatron.settings import Value, is_unset, lower_word
from moewright.intake.megatron.unknown import find_unknown, show_unknown
from moewright.intake.megatron.unread import find_topic
from moewright.spec.errors import BadInput, Reason

_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "uint8": "fp8",
}
# The options of a gate and of an activation, by what a configuration calls them.
_ACTIVATIONS = {
    "silu": "",
    "swish": "",
    "swiglu": "--swiglu",
    "gelu": "",
    "quick_gelu": "--quick-geglu",
    "squared_relu": "--squared-relu",
}
_GRADS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
_GRADS_IN_BF16 = "--grad-reduce-in-bf16"
# Options whose list is one value, written with brackets.
_PATTERNS = ("--moe-layer-freq", "--window-attn-skip-freq", "--linear-attention-freq")
_SWITCHES = ("true", "false", "1", "0", "yes", "no")
_QUERY_GROUPS = "--num-query-groups"


@dataclass(slots=True)
class ChosenOptions:
    """The options of a configuration, by name.

    `cleared` are the switches that it sets to false.
    """

    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)

    def words(self) -> list[str]:
        """Return the options as words of a command."""
        groups = self.options.get(_QUERY_GROUPS)
        is_grouped = "--group-query-attention" not in self.cleared
        if is_grouped and groups and groups != self.options.get("--num-attention-heads"):
            self.options["--group-query-attention"] = ()
        return [word for name, values in self.options.items() for word in (name, *values)]


class SettingReader:
    """A reader of names and values, which knows Megatron-LM's arguments and core's fields."""

    def __init__(self) -> None:
        self.table = option_table()
        self.by_dest: dict[str, list[MegatronOption]] = {}
        for option in self.table.values():
            self.by_dest.setdefault(option.dest, []).append(option)
        self.fields = _read_fields()

    def take(self, name: str, value: Value, chosen: ChosenOptions) -> bool:
        """Set the option that `name` stands for; False where it stands for none.

        Raises:
            BadInput: the value is none that the option takes.
        """
        spelled = name.rpartition(".")[2].replace("-", "_")
        option, rule = self.fields.get(spelled, ("", ""))
        is_set = not is_unset(value)
        if rule == "activation":
            return self._take_activation(value, chosen)
        if rule in ("switch", "off"):
            if is_set:
                self._set_switch(option, _is_true(name, value) == (rule == "switch"), chosen)
        elif rule == "grads":
            if is_set:
                is_fp32 = _is_true(name, value)
                self._set_switch(_GRADS_IN_FP32, is_fp32, chosen)
                self._set_switch(_GRADS_IN_BF16, not is_fp32, chosen)
        elif rule == "graphs":
            if value != "full" and is_set:
                self.set_values(option, value, chosen)
        elif rule == "value":
            if is_set:
                self.set_values(option, value, chosen)
        elif spelled in self.by_dest or f"--{spelled.replace('_', '-')}" in self.table:
            return self._take_argument(name, spelled, value, chosen)
        else:
            return False
        return True

    def _take_argument(self, name: str, spelled: str, value: Value, chosen: ChosenOptions) -> bool:
        spelling = f"--{spelled.replace('_', '-')}"
        options = self.by_dest.get(spelled) or [self.table[spelling]]
        options = sorted(options, key=lambda option: option.name != spelling)
        if is_unset(value):
            return True
        if options[0].value_count != "0":
            values = self._values(options[0], value)
            if not find_topic(spelled) and any(check_values(options[0], values)):
                return False
            chosen.options[options[0].name] = values
            return True
        if not _is_switch(value):
            return False
        is_on = _is_true(name, value)
        if spelled not in self.by_dest:  # it is called as the option is, and is it or not
            self._set_switch(spelling, is_on, chosen)
            return True
        for option in options:
            if is_on == option.clears:
                chosen.options.pop(option.name, None)
                chosen.cleared.add(option.name)
        setting = next((option for option in options if is_on != option.clears), None)
        if setting is not None:
            chosen.options[setting.name] = ()
        return True

    def set_values(self, name: str, value: Value, chosen: ChosenOptions) -> None:
        """Set an option to a text, or to the items of a list."""
        chosen.options[name] = self._values(self.table[name], value)

    def _values(self, option: MegatronOption, value: Value) -> tuple[str, ...]:
        items = value if isinstance(value, tuple) else _split_list(option, value)
        items = tuple(_shorten(option, item.strip()) for item in items)
        if option.value_count == "1" and isinstance(value, tuple):
            joined = ",".join(items)
            return (f"[{joined}]" if option.name in _PATTERNS else joined,)
        return items

    def _set_switch(self, name: str, is_on: bool, chosen: ChosenOptions) -> None:
        if is_on:
            chosen.options[name] = ()
        else:
            chosen.options.pop(name, None)

    def _take_activation(self, value: Value, chosen: ChosenOptions) -> bool:
        spelled = value.rpartition(".")[2] if isinstance(value, str) else ""
        if is_unset(value):
            return True
        if spelled not in _ACTIVATIONS:
            return False
        if option := _ACTIVATIONS[spelled]:
            chosen.options.pop("--swiglu", None)
            chosen.options[option] = ()
        return True


def _read_fields() -> Mapping[str, tuple[str, str]]:
    rows = read_rows("config_fields.csv")
    return {row["field"]: (row["option"], row["rule"]) for row in rows}


def _is_switch(value: Value) -> bool:
    """Whether a value switches something, or is known only where a variable is set."""
    text = lower_word(value)
    return text in _SWITCHES or "\0" in text


def _is_true(name: str, value: Value) -> bool:
    text = lower_word(value)
    if text not in _SWITCHES:
        shown = show_unknown(str(value))[:60]
        rule = "must be true or false"
        unknown = find_unknown(str(value))
        if unknown is None:
            raise BadInput(Reason(field=name, value=shown, rule=rule))
        rule += f", and depends on ${unknown.name}, which is not set"
        raise BadInput(Reason(field=name, rule=rule, nearest=f"--set {name}=false"))
    return text in ("true", "1", "yes")


def _split_list(option: MegatronOption, text: str) -> tuple[str, ...]:
    """Return the items of an option that takes several, written [a, b] or with spaces."""
    if option.value_count in ("0", "1"):
        return (text,)
    inner = text.strip().removeprefix("[").removesuffix("]").replace(",", " ")
    return tuple(_unquote(item) for item in inner.split())


def _unquote(item: str) -> str:
    try:
        return str(ast.literal_eval(item)) if item[:1] in "'\"" else item
    except (ValueError, SyntaxError):
        return item.strip("'\"")


def _shorten(option: MegatronOption, item: str) -> str:
    """Return a dtype by its short name, and a whole number without a fraction."""
    if "fp32" in option.choices:
        return _DTYPES.get(item.rpartition(".")[2], item)
    if option.type == "int" and WHOLE_NUMBER.fullmatch(item):
        return str(int(float(item)))
    return item


def options_with_dashes(settings: Mapping[str, Value], section: str) -> Iterator[tuple[str, Value]]:
    """Yield the settings of a section whose names are options, --as-they-are-written."""
    for name, value in settings.items():
        prefix, _, option = name.rpartition(".")
        if prefix == section and option.startswith("--"):
            yield option, value
