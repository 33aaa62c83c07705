"""The settings of a YAML file on top of the files that it builds on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moewright.codec import read_text
from moewright.codec.yaml_text import parse_yaml
from moewright.intake.megatron.settings import Value, flatten
from moewright.spec.errors import BadInput, Reason

SUFFIXES = (".yaml", ".yml")
_PARENTS = ("defaults", "extends", "bases", "includes")
_MOST_PARENTS = 8
# The leaf that names the parents that are not there.
MISSING_PARENTS = "parents that are not there"
# Where Primus keeps what a module names, below its repository.
_PRESETS = (("config", "primus/configs/modules"), ("model", "primus/configs/models"))
_PRESET_SECTION = "preset"


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
    missing: list[str] = []
    for parent, package in _parents(data):
        file = path.parent / parent
        if not file.is_file():
            missing.append(parent)
        else:
            inherited = read_settings(file, depth + 1)
            prefix = f"{package}." if package else ""
            settings |= {f"{prefix}{name}": value for name, value in inherited.items()}
    own = {key: value for key, value in data.items() if key not in _PARENTS}
    settings |= flatten(own)
    if missing:
        inherited_gaps = settings.get(MISSING_PARENTS, ())
        settings[MISSING_PARENTS] = (*inherited_gaps, *missing)
    return settings if depth else {**_read_presets(settings, path), **settings}


def _parents(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each file that a configuration builds on, and the section that it stands in.

    Hydra's `train: 8x7b` is the file train/8x7b.yaml in the section train.
    """
    for key in _PARENTS:
        names = data.get(key, [])
        for name in [names] if isinstance(names, str) else names or []:
            if isinstance(name, str) and name.endswith(SUFFIXES):
                yield name, ""
            elif isinstance(name, str) and name != "_self_":
                yield f"{name}.yaml", ""
            elif isinstance(name, Mapping):
                for group, choice in name.items():
                    if isinstance(choice, str) and choice:
                        plain = str(group).rpartition(" ")[2]
                        yield f"{plain}/{choice}.yaml", plain


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
                file = above / folder / framework / name.rpartition(":")[2].rstrip("}")
                if file.is_file():
                    prefix = f"modules.{module}.{_PRESET_SECTION}."
                    for key_inside, value in read_settings(file, 1).items():
                        presets[f"{prefix}{key_inside}"] = value
                    break
    return presets
