"""Settings of a configuration, by their dotted names: from YAML, and from words such as a.b=c."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moewright.codec.yaml_text import parse_yaml
from moewright.spec.errors import BadInput, Reason

Value = str | tuple[str, ...]

_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_][\w/@-]*(?:\.[\w/@-]+)*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)")
_VARIABLE = re.compile(r"(?:oc\.env:)?([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:=|:|,)(.*))?", re.DOTALL)
# Computations that NeMo and NeMo-RL register with OmegaConf.
_COMPUTATIONS: Mapping[str, Callable[[float, float], float]] = {
    "multiply": operator.mul,
    "mul": operator.mul,
    "sum": operator.add,
    "add": operator.add,
}
_LAUNCHER = "training."
_NOTHING = ("", "null", "none", "~", "[]", "{}")
_STAGE_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_MOST_SETTINGS = 20_000
_MOST_ROUNDS = 8  # of references to references


def is_unset(value: Value) -> bool:
    """Whether a value says that nothing was set."""
    return not value or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def read_override(word: str) -> tuple[str, str] | None:
    """Return the name and the text of a word such as model.hidden_size=64; None for another."""
    match = _OVERRIDE.fullmatch(word)
    return (match[1], match[2]) if match else None


def read_overrides(words: Sequence[str]) -> dict[str, Value]:
    """Return the settings of the words that are overrides; lists are read as YAML reads them."""
    settings: dict[str, Value] = {}
    for word in words:
        override = read_override(word)
        if override is None:
            continue
        name, text = override
        text = text.strip()
        is_structure = text.startswith(("[", "{")) and "\0" not in text
        data = parse_yaml(text, where=word[:60]) if is_structure else text.strip("'\"")
        settings |= flatten(data, name)
    return settings


def flatten(data: Any, name: str = "") -> dict[str, Value]:
    """Return the leaves of nested mappings by their dotted names.

    Raises:
        BadInput: there are more than any configuration has.
    """
    settings: dict[str, Value] = {}
    for path, value in _leaves(data, name):
        settings[path] = value
        if len(settings) > _MOST_SETTINGS:
            rule = f"has more than {_MOST_SETTINGS} settings"
            raise BadInput(Reason(field=name or "configuration", rule=rule))
    return settings


def _leaves(data: Any, name: str) -> Iterator[tuple[str, Value]]:
    if isinstance(data, Mapping):
        if data.get("_call_") == "false" and "_target_" in data:
            # A value that a dump spells as what makes it: torch.bfloat16.
            yield name, str(data["_target_"]).rpartition(".")[2]
        elif "_name_" in data:
            yield name, str(data["_name_"])
        else:
            for key, inner in data.items():
                yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(data, list):
        if data and all(_is_stage(item) for item in data):
            yield name, "|".join(_stage_letters(item) for item in data)
        else:
            yield name, tuple(str(item) for item in data)
    else:
        yield name, "" if data is None else str(data)


def _is_stage(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(name, str) for name in item)


def _stage_letters(names: Sequence[str]) -> str:
    """Return the part of a pipeline layout that a list of its layers' names stands for."""
    return "".join(_STAGE_LETTERS.get(name, str(name)) for name in names)


def resolve_references(
    settings: Mapping[str, Value], environment: Mapping[str, str]
) -> dict[str, Value]:
    """Return the settings with ${a.b} and ${VARIABLE:-default} replaced.

    A variable that is not set stands as its name between zero bytes, as in a script's words.
    """
    resolved = dict(settings)
    for _ in range(_MOST_ROUNDS):
        before = dict(resolved)
        for name, value in before.items():
            if isinstance(value, str) and "$" in value:
                resolved[name] = _replace(value, name, before, environment)
        if resolved == before:
            break
    return resolved


def _replace(
    text: str, name: str, settings: Mapping[str, Value], environment: Mapping[str, str]
) -> str:
    def look_up(match: re.Match[str]) -> str:
        inner = match[1] if match[1] is not None else match[2]
        computed = _compute(inner)
        if computed:
            return computed
        other = _absolute_name(inner, name)
        if other not in settings and other.startswith(_LAUNCHER):
            other = other.removeprefix(_LAUNCHER)  # a file that stands below training there
        if other in settings and other != name:
            value = settings[other]
            return value if isinstance(value, str) else f"[{','.join(value)}]"
        variable = _VARIABLE.fullmatch(inner)
        if variable is None:
            return f"\0{inner.replace('.', '-')[:60]}\0"
        default = variable[3] if variable[2] else f"\0{variable[1]}\0"
        return environment.get(variable[1], default)

    return _REFERENCE.sub(look_up, text)


def _compute(text: str) -> str:
    """Return the number that NeMo's ${multiply:4, 2} stands for; "" for other references."""
    name, colon, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")]
    if not colon or name not in _COMPUTATIONS or not all(map(_is_number, parts)):
        return ""
    value = float(parts[0])
    for part in parts[1:]:
        value = _COMPUTATIONS[name](value, float(part))
    return f"{value:.0f}" if value.is_integer() else str(value)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def _absolute_name(reference: str, name: str) -> str:
    """Return the setting that a reference in the setting `name` means; dots lead upwards."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference
    parts = name.split(".")[: -dots or None]
    return ".".join((*parts, reference[dots:]))
