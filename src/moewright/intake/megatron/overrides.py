"""Values that are given beside a script or a configuration, and win over what stands in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.unknown import find_unknown
from moewright.spec.errors import BadInput, Reason

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SETTING = re.compile(r"[A-Za-z_][\w-]*(\.[\w/-]+)+")
_LEFT_OUT = "null"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOverrides:
    """Values by name, given beside a file whose own they replace.

    `variables` are the shell's; `options` are a command's, None where one is left out; `settings`
    are words such as model.num_layers=4.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def settings_of_files(self) -> tuple[str, ...]:
        """Return the settings of a configuration: those of its first level have no dot."""
        plain = (f"{name}={value}" for name, value in self.variables.items() if name.islower())
        return (*self.settings, *plain)

    def replace_options(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command with the options that are given.

        Raises:
            BadInput: one that is to be left out is not there.
        """
        kept: list[str] = []
        taken: set[str] = set()
        is_dropped = False
        for word in words:
            if word.startswith("--"):
                name = _spell(word.partition("=")[0])
                is_dropped = name in self.options
                taken |= {name} & self.options.keys()
            if not is_dropped:
                kept.append(word)
        unknown = [value for value in map(find_unknown, kept) if value is not None]
        taken |= {_spell(option.partition("=")[0]) for value in unknown for option in value.words}
        kept = [answered for word in kept for answered in self._answer(word)]
        for name, values in self.options.items():
            if values is not None:
                kept += [name, *values]
            elif name not in taken:
                rule = "is not in the command, so that it cannot be left out"
                raise BadInput(Reason(field=f"--set {name}={_LEFT_OUT}", rule=rule))
        return kept

    def _answer(self, word: str) -> list[str]:
        """Return a word without the options that are given, where only running tells what it is."""
        unknown = find_unknown(word)
        if unknown is None or not unknown.words:
            return [word]
        left: list[str] = []
        is_dropped = False
        for option in unknown.words:
            if option.startswith("--"):
                is_dropped = _spell(option.partition("=")[0]) in self.options
            if not is_dropped:
                left.append(option)
        return [replace(unknown, words=tuple(left)).mark()] if left else []


def parse_script_overrides(texts: Sequence[str]) -> ScriptOverrides:
    """Parse NAME=VALUE of variables, options (--num-layers=4) and settings (model.num_layers=4).

    The value null leaves an option out; a switch is also true or false.

    Raises:
        BadInput: a text is none of them.
    """
    variables: dict[str, str] = {}
    options: dict[str, tuple[str, ...] | None] = {}
    settings: list[str] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise _refuse(text, "needs a value", f"{text[:40]}=...")
        if name.startswith("--") and len(name) > len("--"):
            options[_spell(name)] = _parse_option(text, _spell(name), value)
        elif _VARIABLE.fullmatch(name):
            variables[name] = value
        elif _SETTING.fullmatch(name):
            settings.append(text)
        else:
            raise _refuse(text, "names no variable, option or setting", "NNODES=8")
    return ScriptOverrides(variables=variables, options=options, settings=tuple(settings))


def _parse_option(text: str, name: str, value: str) -> tuple[str, ...] | None:
    """Return the values of an option, None to leave it out; a switch is true or false."""
    option = option_table().get(name)
    if option is not None and option.value_count == "0" and value.casefold() in ("true", "false"):
        return () if value.casefold() == "true" else None
    return None if value == _LEFT_OUT else _split(text, value)


def _spell(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


def _split(text: str, value: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise _refuse(text, f"cannot be read: {error}", "") from None


def _refuse(text: str, rule: str, nearest: str) -> BadInput:
    return BadInput(Reason(field="--set", value=text[:60], rule=rule, nearest=nearest))
