"""Records of families: what a config.json says is written again, and nothing else asks a family."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import moewright
from moewright.families.table import FAMILIES, nested_families
from moewright.intake import hf
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec

PACKAGE = Path(moewright.__file__).parent
DRAWS = 60  # of each family
JUNK = (None, True, False, 0, 1, 2, 3, 0.5, 64, "silu", [], {})


def published_configs() -> dict[str, list[dict[str, Any]]]:
    """Return the configs of the catalogue by their family."""
    file = resources.files("moewright.intake").joinpath("data/models.json")
    configs: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(file.read_text()).values():
        config = entry["config"]
        if config["model_type"] in nested_families():
            family = nested_families()[config["model_type"]].model_type
            config = config["text_config"] | {"model_type": family}
        configs.setdefault(config["model_type"], []).append(config)
    return configs


CONFIGS = published_configs()


def draw_configs(family: str) -> Iterator[dict[str, Any]]:
    """Yield configs of a family in which fields are dropped, taken from others, or made up."""
    rng = random.Random(family)
    values: dict[str, list[Any]] = {}
    for config in (config for configs in CONFIGS.values() for config in configs):
        for name, value in config.items():
            values.setdefault(name, []).append(value)
    for _ in range(DRAWS):
        config = dict(rng.choice(CONFIGS[family]))
        for _ in range(rng.randint(1, 3)):
            name = rng.choice((*values, *config))
            kind = rng.random()
            if kind < 0.3:
                config.pop(name, None)
            elif kind < 0.7:
                config[name] = rng.choice(values[name])
            else:
                config[name] = rng.choice(JUNK)
        yield config | {"model_type": family}


def read(config: dict[str, Any]) -> ModelSpec:
    return hf.parse_config(config, where="c", name="m")


DENSE = {family for family, configs in CONFIGS.items() if all(read(c).moe is None for c in configs)}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_what_is_read_is_written_to_the_same_model(family: str) -> None:
    """Also of families whose config.json has no class in transformers yet."""
    count = 0
    for config in draw_configs(family):
        try:
            model = read(config)
            written = FAMILIES[family].write_config(model)
        except BadInput:
            continue
        if model.moe is None and family not in DENSE:
            continue  # without a layer that has experts, nothing says what they would be
        count += 1
        assert read(json.loads(json.dumps(written))) == model, config
    assert count > DRAWS / 10


def test_nothing_but_its_record_knows_a_family() -> None:
    """A question of a family elsewhere would be one more place that a new family must touch."""
    asks = re.compile(r"\.family(?: (?:==|!=|in|not in) |\.startswith)")
    places = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "families"
        for line in path.read_text().splitlines()
        if asks.search(line)
    ]
    assert places == []
