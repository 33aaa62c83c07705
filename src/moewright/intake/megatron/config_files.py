"""Configurations of frameworks on Megatron-core as the launch command that they stand for.

Read are Megatron-LM's MODEL_ARGS, its own YAML, Megatron Bridge, NeMo, NeMo-RL, verl and Primus.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moewright.codec import from_data, read_text
from moewright.codec.yaml_text import parse_yaml
from moewright.intake import catalogue
from moewright.intake.megatron.bash import UNKNOWN_VALUE
from moewright.intake.megatron.config_fields import (
    ChosenOptions,
    SettingReader,
    options_with_dashes,
)
from moewright.intake.megatron.post_training import verl_batches
from moewright.intake.megatron.settings import (
    Value,
    flatten,
    is_unset,
    read_override,
    read_overrides,
    resolve_references,
)
from moewright.spec.errors import BadInput, Reason

SUFFIXES = (".yaml", ".yml")
_OPTION_SECTIONS = ("MODEL_ARGS", "model_args", "")
_ENVIRONMENT_SECTION = "ENV_VARS"
_CONFIG_OPTIONS = ("--config-file", "--config_file", "--config", "--yaml-cfg", "--exp")
_PARENTS = ("defaults", "extends")
_MOST_PARENTS = 8
_CHECKPOINTING = "policy.megatron_cfg.activation_checkpointing"
_PRECISIONS = {
    "bf16_with_fp8_delayed_scaling_mixed": ("hybrid", "delayed"),
    "bf16_with_fp8_current_scaling_mixed": ("hybrid", "tensorwise"),
    "bf16_with_fp8_subchannel_scaling_mixed": ("hybrid", "blockwise"),
    "bf16_with_mxfp8_mixed": ("e4m3", "mxfp8"),
    "nanov2_bf16_with_fp8_current_scaling_mixed": ("hybrid", "tensorwise"),
}
_RECIPE_TAIL = re.compile(r"_(pretrain|finetune|sft|peft|lora|config|mcore|\d+gpu|h100|b200).*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDialect:
    """How a framework spells a training; data/config_dialects.toml says what the fields mean."""

    name: str
    source: str
    marker: str
    sections: tuple[str, ...]
    model: tuple[str, ...]
    nodes: str
    ranks_per_node: str
    defaults: str
    settings: Mapping[str, str]
    quiet: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfiguredCommand:
    """The words of the launch command that a configuration stands for.

    `model` is the name that the configuration has for its model, "" where it gives sizes; `unread`
    are settings that nothing here reads.
    """

    words: tuple[str, ...]
    exported: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_configured(words: Sequence[str]) -> bool:
    """Whether the words of a command hold settings of a framework that is read here."""
    names = {override[0] for override in map(read_override, words) if override is not None}
    markers = tuple(dialect.marker for dialect in _list_dialects() if dialect.marker)
    parallel = "model_parallel_size"
    return any(name.startswith(markers) and parallel in name for name in names)


def configure_words(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | None
) -> ConfiguredCommand:
    """Return the command of words such as model.num_layers=4, on top of the file that they name.

    Raises:
        BadInput: the file cannot be read, or the settings are of no framework that is known here.
    """
    settings: dict[str, Value] = {}
    for name, value in zip(words, [*words[1:], ""], strict=True):
        option, equals, inline = name.partition("=")
        path = Path(UNKNOWN_VALUE.sub("", inline if equals else value))
        if option in _CONFIG_OPTIONS and path.suffix in SUFFIXES and folder is not None:
            settings |= read_settings(folder / path)
        elif option in ("--recipe", "--recipe-name"):
            settings["recipe"] = inline if equals else value
    settings |= read_overrides(words)
    return configure(resolve_references(settings, environment))


def configure_file(
    path: Path, environment: Mapping[str, str], arguments: Sequence[str]
) -> ConfiguredCommand:
    """Return the command of a YAML file; `arguments` are overrides, or options behind it.

    Raises:
        BadInput: the file cannot be read, or is of no framework that is known here.
    """
    settings = read_settings(path) | read_overrides(arguments)
    command = configure(resolve_references(settings, environment))
    options = [word for word in arguments if read_override(word) is None]
    return ConfiguredCommand(
        words=(*command.words, *options),
        exported=command.exported,
        model=command.model,
        unread=command.unread,
        notes=command.notes,
    )


def read_settings(path: Path, depth: int = 0) -> dict[str, Value]:
    """Return the settings of a YAML file, on top of the files that it names as its parents.

    Raises:
        BadInput: a file cannot be read, or names its parents in a circle.
    """
    data = parse_yaml(read_text(path), where=str(path))
    if not isinstance(data, Mapping):
        raise BadInput(Reason(field=str(path), rule="is no configuration: a mapping"))
    if depth > _MOST_PARENTS:
        rule = f"has more than {_MOST_PARENTS} parents above each other"
        raise BadInput(Reason(field=str(path), rule=rule))
    settings: dict[str, Value] = {}
    for parent in _parents(data):
        if (path.parent / parent).is_file():
            settings |= read_settings(path.parent / parent, depth + 1)
    own = {key: value for key, value in data.items() if key not in _PARENTS}
    return settings | flatten(own)


def _parents(data: Mapping[str, Any]) -> Iterator[str]:
    for key in _PARENTS:
        names = data.get(key, [])
        for name in [names] if isinstance(names, str) else names:
            if isinstance(name, str) and name.endswith(SUFFIXES):
                yield name


def configure(settings: Mapping[str, Value]) -> ConfiguredCommand:
    """Return the command of settings whose references are replaced.

    Raises:
        BadInput: they are of no framework that is known here.
    """
    for section in _OPTION_SECTIONS:
        if any(options_with_dashes(settings, section)):
            return _configure_options(settings, section)
    dialect = next(filter(lambda entry: _speaks(entry, settings), _list_dialects()))
    reader = SettingReader()
    defaults = _default_options(reader, dialect)
    chosen = ChosenOptions(options=dict(defaults))
    read = _read_sections(reader, dialect, settings, chosen)
    if chosen.options == defaults:
        rule = "holds no setting of Megatron: MODEL_ARGS, or sections such as model and train"
        raise BadInput(Reason(field="configuration", rule=rule, nearest="MODEL_ARGS:"))
    notes = [f"a configuration of {dialect.name}: {len(read)} settings are read"]
    _settle(settings, chosen.options)
    notes += _take_precision(reader, settings, chosen)
    notes += verl_batches(settings, chosen.options)
    model = _name_model(dialect, settings)
    if settings.get("recipe") and "--num-layers" not in chosen.options:
        notes.append(
            f"recipe {settings['recipe']} itself is not read: what is not set beside it is taken "
            "at its default; give the run_config.yaml of its checkpoint for all of it"
        )
    launcher = [
        f"{name}={settings[key]}"
        for name, key in (("--nnodes", dialect.nodes), ("--nproc_per_node", dialect.ranks_per_node))
        if key and not is_unset(settings.get(key, ""))
    ]
    return ConfiguredCommand(
        words=(*launcher, *chosen.words()),
        model=model if "--num-layers" not in chosen.options else "",
        unread=tuple(chosen.unread),
        notes=tuple(notes),
    )


def _configure_options(settings: Mapping[str, Value], section: str) -> ConfiguredCommand:
    """Return the command of settings that are options of Megatron-LM, as its own tests have them.

    A switch that is false is left out, as the tools do that start them.
    """
    reader = SettingReader()
    chosen = ChosenOptions()
    words: list[str] = []
    for name, value in options_with_dashes(settings, section):
        option = reader.table.get(name)
        if is_unset(value) or (isinstance(value, str) and value.lower() == "false"):
            continue
        if isinstance(value, str) and value.lower() == "true":
            words.append(name)
        elif option is not None and option.value_count == "0":
            _refuse_unknown(name, str(value))
        elif option is not None:
            plain = value.strip().strip("'\"") if isinstance(value, str) else value
            reader.set_values(name, plain, chosen)
        else:
            words += [name, *([value] if isinstance(value, str) else value)]
    prefix = f"{_ENVIRONMENT_SECTION}."
    exported = {
        name.removeprefix(prefix): str(value)
        for name, value in settings.items()
        if name.startswith(prefix)
    }
    return ConfiguredCommand(words=(*chosen.words(), *words), exported=exported)


def _refuse_unknown(name: str, value: str) -> None:
    """Refuse a switch whose value is neither true nor false, or stands in the environment."""
    variable = UNKNOWN_VALUE.search(value)
    if variable is not None:
        rule = f"takes the value of {variable[1]}, which is not set; set it in the environment"
        nearest = f"{variable[1]}=true before this command"
        raise BadInput(Reason(field=name, rule=rule, nearest=nearest))
    raise BadInput(Reason(field=name, value=value[:60], rule="must be true or false"))


def _list_dialects() -> tuple[ConfigDialect, ...]:
    file = resources.files("moewright.intake.megatron").joinpath("data/config_dialects.toml")
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["dialect"]
    return tuple(from_data(ConfigDialect, entry, where="config_dialects.toml") for entry in entries)


def _speaks(dialect: ConfigDialect, settings: Mapping[str, Value]) -> bool:
    return any(name.startswith(dialect.marker) for name in settings)


def _default_options(reader: SettingReader, dialect: ConfigDialect) -> dict[str, tuple[str, ...]]:
    """Return what a framework sets by itself."""
    options: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in dialect.defaults.split():
        if word in reader.table:
            name = word
            options[name] = ()
        else:
            options[name] = (*options[name], word)
    return options


def _read_sections(
    reader: SettingReader,
    dialect: ConfigDialect,
    settings: Mapping[str, Value],
    chosen: ChosenOptions,
) -> set[str]:
    """Read the sections of a dialect in its order; return the names of all settings in them."""
    read: set[str] = set()
    for section in dialect.sections:
        pattern = re.compile(re.escape(section).replace(r"\*", "[^.]+"))
        outside = ChosenOptions(options=chosen.options)
        is_quiet = section in dialect.quiet
        for name, value in settings.items():
            if pattern.fullmatch(name.rpartition(".")[0]) and name not in dialect.settings:
                reader.take(name, value, outside if is_quiet else chosen)
                read.add(name)
    for name, option in dialect.settings.items():
        if option and not is_unset(settings.get(name, "")):
            reader.set_values(option, settings[name], chosen)
            read.add(name)
    return read


def _settle(settings: Mapping[str, Value], options: dict[str, tuple[str, ...]]) -> None:
    """Leave out options that others make void."""
    is_on = str(settings.get(_CHECKPOINTING, "true")).lower()
    if is_on != "true":
        for name in ("--recompute-granularity", "--recompute-modules"):
            options.pop(name, None)
    if options.get("--recompute-granularity") == ("full",):
        options.setdefault("--recompute-method", ("uniform",))
        options.setdefault("--recompute-num-layers", ("1",))
    if "--fp16" in options:
        options.pop("--bf16", None)
    if "--pipeline-model-parallel-layout" in options:
        options.pop("--num-virtual-stages-per-pipeline-rank", None)
    tp = options.get("--tensor-model-parallel-size", ("1",))
    if tp == ("1",) or "--sequence-parallel" not in options:
        options.pop("--tp-comm-overlap", None)  # as Bridge itself does, with a warning
    if not options.keys().isdisjoint(("--quick-geglu", "--squared-relu")):
        options.pop("--swiglu", None)


def _take_precision(
    reader: SettingReader, settings: Mapping[str, Value], chosen: ChosenOptions
) -> Iterator[str]:
    """Read a precision that is a name, as Bridge and NeMo have them; yield a note on another."""
    name = str(settings.get("mixed_precision", "") or settings.get("trainer.precision", ""))
    if name.startswith(("fp16", "16")):
        chosen.options.pop("--bf16", None)
        chosen.options["--fp16"] = ()
    elif name.startswith("32"):
        chosen.options.pop("--bf16", None)
    elif name in _PRECISIONS:
        form, recipe = _PRECISIONS[name]
        reader.set_values("--fp8-format", form, chosen)
        reader.set_values("--fp8-recipe", recipe, chosen)
        if recipe == "delayed":  # Bridge's and NeMo's recipe, not Megatron-LM's defaults
            reader.set_values("--fp8-amax-history-len", "1024", chosen)
            reader.set_values("--fp8-amax-compute-algo", "max", chosen)
    elif "nvfp4" in name:
        reader.set_values("--fp4-format", "e2m1", chosen)
    elif not is_unset(name) and not name.startswith("bf16"):
        yield f"precision {name[:60]} is not known here: bf16 is taken"


def _name_model(dialect: ConfigDialect, settings: Mapping[str, Value]) -> str:
    """Return the model's name as the catalogue has it, or else as the configuration has it."""
    for pattern in dialect.model:
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for name, value in settings.items():
            if expression.fullmatch(name) and isinstance(value, str) and not is_unset(value):
                return _find_model(value)
    return ""


def _find_model(text: str) -> str:
    plain = UNKNOWN_VALUE.sub("", text).rstrip("/").rpartition("/")[2].removesuffix(".yaml")
    plain = _RECIPE_TAIL.sub("", plain)
    names = {_squeeze(name.rpartition("/")[2]): name for name in catalogue.model_names()}
    return names.get(_squeeze(plain), plain)


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
