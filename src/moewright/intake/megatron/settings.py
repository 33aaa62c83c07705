"""Settings of a configuration, by their dotted names: read on top of the files it builds on."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moewright.codec import parse_json, parse_toml, read_text
from moewright.codec.yaml_text import parse_yaml
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import mention

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
    "div": operator.truediv,
    "floor_div": operator.floordiv,
    "ceil_div": lambda first, second: -(-first // second),
}
_RESOLVER = re.compile(r"(?!oc\.env)([a-z][a-z_.]*):(?!-|=).*", re.DOTALL)
# OmegaConf's own, which reads a text as YAML: what it stands for is a text here.
_DECODED = "oc.decode:"
_NOTHING = ("", "null", "none", "~", "[]", "{}")
_STAGE_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_MOST_SETTINGS = 20_000
_MOST_ROUNDS = 8  # of references to references
_MOST_CHARACTERS = 1 << 24  # of what references stand for, in a round: each may double the last


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
                yield from _leaves(inner, mention("{}.", name) + str(key))
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

    Raises:
        BadInput: references to references stand for a text that grows without end.
    """
    resolved = dict(settings)
    for _ in range(_MOST_ROUNDS):
        before = dict(resolved)
        left = _MOST_CHARACTERS
        for name, value in before.items():
            if isinstance(value, str) and "$" in value:
                resolved[name] = _replace(value, name, before, environment, left)
                left -= len(resolved[name])
        if resolved == before:
            break
    return resolved


def find_referenced(settings: Mapping[str, Value]) -> frozenset[str]:
    """Return the names of settings whose values others take: these account for them."""
    return frozenset(
        _absolute_name(match[1] or "", name)
        for name, value in settings.items()
        if isinstance(value, str) and "$" in value
        for match in _REFERENCE.finditer(value)
    )


def find_aliases(settings: Mapping[str, Value]) -> frozenset[str]:
    """Return the names of settings that repeat another one's value and say nothing of their own."""
    return frozenset(
        name
        for name, value in settings.items()
        if isinstance(value, str)
        and (match := _REFERENCE.fullmatch(value.strip()))
        and _absolute_name(match[1] or "", name) in settings
    )


def _replace(
    text: str, name: str, settings: Mapping[str, Value], environment: Mapping[str, str], most: int
) -> str:
    """Return a text of at most `most` characters with its references replaced once."""
    length = 0
    sections = {setting.partition(".")[0] for setting in settings}

    def take(match: re.Match[str]) -> str:
        nonlocal length
        value = look_up(match)
        length += len(value)
        if length > most:
            rule = f"has references that stand for more than {_MOST_CHARACTERS:,} characters"
            raise BadInput(Reason(field=name, rule=rule))
        return value

    def look_up(match: re.Match[str]) -> str:
        inner = match[1] if match[1] is not None else match[2]
        if inner.startswith(_DECODED):
            return inner.removeprefix(_DECODED)
        computed = _compute(inner)
        if computed:
            return computed
        resolver = _RESOLVER.fullmatch(inner)
        if resolver is not None:  # a computation that is not known here
            unknown = UNKNOWN_VALUE.search(inner)
            return f"\0{resolver[1]}\0" if unknown is None else unknown[0]
        other = _absolute_name(inner, name)
        group, _, below = other.partition(".")
        if other not in settings and below in settings and group not in sections:
            other = below  # a file that stands below a group of its own where it is composed
        if other in settings and other != name:
            value = settings[other]
            return value if isinstance(value, str) else f"[{','.join(value)}]"
        variable = _VARIABLE.fullmatch(inner)
        if variable is None:
            return f"\0{inner[:60]}\0"
        default = variable[3] if variable[2] else f"\0{variable[1]}\0"
        return environment.get(variable[1], default)

    return _REFERENCE.sub(take, text)


def _compute(text: str) -> str:
    """Return the number that NeMo's ${multiply:4, 2} stands for; "" for other references.

    Of what only running tells it is unknown too.
    """
    name, colon, rest = text.partition(":")
    if not colon or name not in _COMPUTATIONS:
        return ""
    unknown = UNKNOWN_VALUE.search(rest)
    if unknown is not None:
        return unknown[0]
    parts = [part.strip() for part in rest.split(",")]
    if not all(map(_is_number, parts)) or (name.endswith("div") and float(parts[-1]) == 0):
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


def spell_value(value: Value) -> str:
    """Return a value as text; the items of a list with commas between them."""
    return value if isinstance(value, str) else ",".join(value)


def lower_word(value: Value) -> str:
    """Return the word of a value in small letters; "" for a list."""
    return value.strip().lower() if isinstance(value, str) else ""


class SettingTree:
    """Leaves by their dotted names; a reader cannot look at a value without taking it."""

    def __init__(self, settings: Mapping[str, Value]) -> None:
        self._settings = dict(settings)
        self._taken: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all leaves; a name alone tells no value."""
        return tuple(self._settings)

    @property
    def taken_count(self) -> int:
        """Return how many leaves readers took."""
        return len(self._taken)

    def matches(self, pattern: str) -> bool:
        """Whether a leaf has a name of this pattern, in which * stands for anything."""
        return any(fnmatchcase(name, pattern) for name in self._settings)

    def take(self, name: str, default: Value = "") -> Value:
        """Return the value of a leaf."""
        if name not in self._settings:
            return default
        self._taken.add(name)
        return self._settings[name]

    def take_text(self, name: str, default: str = "") -> str:
        """Return the text of a leaf; the items of a list with commas between them."""
        return spell_value(self.take(name, default))

    def peek_text(self, name: str) -> str:
        """Return the text of a leaf without taking it."""
        return spell_value(self._settings.get(name, ""))

    def take_items(self, name: str) -> tuple[str, ...]:
        """Return the items of a leaf that is a list."""
        value = self.take(name)
        return (value,) if isinstance(value, str) and value else tuple(value)

    def take_section(self, section: str, others: Iterable[str]) -> Iterator[tuple[str, Value]]:
        """Yield the leaves right in a section but those that match one of `others`.

        In a section's name * is one part of a name.
        """
        pattern = re.compile(re.escape(section).replace(r"\*", "[^.]+"))
        for name in self._settings:
            is_inside = pattern.fullmatch(name.rpartition(".")[0])
            is_other = any(fnmatchcase(name, other) for other in others)
            if is_inside and not is_other and name not in self._taken:
                yield name, self.take(name)

    def take_below(self, prefix: str) -> dict[str, str]:
        """Return the texts of the leaves below a section, by the rest of their names."""
        names = [name for name in self._settings if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.take_text(name) for name in names}

    def left(self) -> dict[str, Value]:
        """Return the leaves that nobody took."""
        return {name: value for name, value in self._settings.items() if name not in self._taken}


SUFFIXES = (".yaml", ".yml")
_PARENTS = ("defaults", "extends", "bases", "includes")
_CHOOSES = "override "
_CHOICE = re.compile(r"\$\{(\w+)\}")
_OWN_PACKAGES = ("_here_", "_global_")  # Hydra's, of the file itself
_MOST_PARENTS = 8
_LEVELS = 6  # folders above a file that may be its checkout
_MOST_FILES = 200  # parents that each name two others are 2^8
# The leaf that names the parents that are not there.
MISSING_PARENTS = "parents that are not there"
# Where Primus keeps what a module names, below its repository.
_PRESETS = (("config", "primus/configs/modules"), ("model", "primus/configs/models"))
_PRESET_SECTION = "preset"
_DEFAULTED = re.compile(r"\$\{\w+:-?([^{}]*)\}")  # ${PRIMUS_MODEL:mixtral_8x7B}.yaml


def read_settings(path: Path) -> dict[str, Value]:
    """Return the settings of a YAML file, on top of the files that it names as its parents.

    Raises:
        BadInput: a file cannot be read, or names its parents in a circle, or too many.
    """
    settings = _read_inherited(path, 0, [], {})
    return {**_read_presets(settings, path), **settings}


def _read_inherited(
    path: Path, depth: int, files: list[Path], choices: Mapping[str, str]
) -> dict[str, Value]:
    """Return the settings of a file with those of its parents; `files` are those read so far.

    `choices` are what a file above it chose of Hydra's groups, which win over its own.
    """
    data = _parse_text(path)
    if not isinstance(data, Mapping):
        raise BadInput(Reason(field=str(path), rule="is no configuration: a mapping"))
    if depth > _MOST_PARENTS:
        rule = f"has more than {_MOST_PARENTS} parents above each other"
        raise BadInput(Reason(field=str(path), rule=rule))
    files.append(path)
    if len(files) > _MOST_FILES:
        rule = f"builds on more than {_MOST_FILES} files, counted as often as they are named"
        raise BadInput(Reason(field=str(files[0]), rule=rule))
    settings: dict[str, Value] = {}
    missing: list[str] = []
    choices = {**_choices(data), **choices}
    for parent, package in _parents(data, choices):
        file = _find_parent(path, parent)
        if not file.is_file() or not isinstance(_parse_text(file), Mapping):
            missing.append(parent)  # a list holds no settings of this file
        else:
            inherited = _read_inherited(file, depth + 1, files, choices)
            prefix = mention("{}.", package)
            settings |= {f"{prefix}{name}": value for name, value in inherited.items()}
    own = {key: value for key, value in data.items() if key not in _PARENTS}
    settings |= flatten(own)
    if missing:
        inherited_gaps = settings.get(MISSING_PARENTS, ())
        settings[MISSING_PARENTS] = (*inherited_gaps, *missing)
    return settings


def _find_parent(path: Path, parent: str) -> Path:
    """Return a file that a configuration builds on: beside it, or by its path in the checkout."""
    neighbour = path.parent / parent
    if neighbour.is_file() or "/" not in parent:
        return neighbour
    above = (folder / parent for folder in list(path.resolve().parent.parents)[:_LEVELS])
    return next((file for file in above if file.is_file()), neighbour)


def _parse_text(path: Path) -> Any:
    """Return what a file in TOML, JSON or YAML holds.

    Raises:
        BadInput: it cannot be read.
    """
    text = read_text(path)
    if path.suffix.lower() == ".json":
        return parse_json(text, where=str(path))
    if path.suffix.lower() == ".toml":
        return parse_toml(text, where=str(path))
    return parse_yaml(text, where=str(path))


def _choices(data: Mapping[str, Any]) -> dict[str, str]:
    """Return what Hydra's defaults choose of each group: `override engine: core` is the last."""
    names = data.get("defaults", [])
    entries = [entry for entry in names if isinstance(entry, Mapping)] if names else []
    pairs = [(str(group), choice) for entry in entries for group, choice in entry.items()]
    pairs.sort(key=lambda pair: pair[0].startswith(_CHOOSES))
    return {
        group.removeprefix(_CHOOSES): choice for group, choice in pairs if isinstance(choice, str)
    }


def _parents(data: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each file that a configuration builds on, and the section that it stands in.

    Hydra's `train: 8x7b` is the file train/8x7b.yaml in the section train, and `engine@megatron:
    core` the file engine/core.yaml in the section megatron; ${engine} is what `choices` have of it.
    """
    for key in _PARENTS:
        names = data.get(key, [])
        for name in [names] if isinstance(names, str) else names or []:
            if isinstance(name, str) and name.endswith(SUFFIXES):
                yield name, ""
            elif isinstance(name, str) and name != "_self_":
                file, _, section = name.partition("@")
                yield f"{file}.yaml", "" if section in _OWN_PACKAGES else section
            elif isinstance(name, Mapping):
                for group, own in name.items():
                    folder, at, section = str(group).rpartition(" ")[2].partition("@")
                    if str(group).startswith(_CHOOSES):
                        continue  # of a group that a parent has
                    for choice in own if isinstance(own, list) else [choices.get(group, own)]:
                        if isinstance(choice, str) and choice:
                            chosen = _CHOICE.sub(lambda m: choices.get(m[1], m[0]), choice)
                            yield f"{folder}/{chosen}.yaml", section if at else folder


def _read_presets(settings: Mapping[str, Value], path: Path) -> dict[str, Value]:
    """Return what Primus' own files say of the modules in a configuration of its checkout."""
    presets: dict[str, Value] = {}
    modules = sorted({name.split(".")[1] for name in settings if name.startswith("modules.")})
    for module in modules:
        framework = settings.get(f"modules.{module}.framework", "")
        for key, folder in _PRESETS:
            name = settings.get(f"modules.{module}.{key}", "")
            if not (isinstance(framework, str) and isinstance(name, str) and framework):
                continue
            for above in path.resolve().parents:
                file = above / folder / framework / _DEFAULTED.sub(r"\1", name)
                if file.is_file():
                    prefix = f"modules.{module}.{_PRESET_SECTION}."
                    for key_inside, value in _read_inherited(file, 1, [], {}).items():
                        presets[f"{prefix}{key_inside}"] = value
                    break
    return presets
