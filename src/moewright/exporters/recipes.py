"""Published training recipes: what a model's makers trained it with, for fields that a plan leaves.

The table is data/recipes.toml, a source in each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from moewright.codec import from_data
from moewright.codec.files import parse_toml
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_TABLE = "data/recipes.toml"
_ANY = "*"
# The records of a workload that a recipe speaks of.
_SECTIONS = ("optimizer", "loss", "router")
_BALANCE = ("aux_coeff", "seq_aux_coeff", "global_aux_coeff")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """A published recipe; `train` are keys of a job's section of that name.

    `batch` says for how many tokens a step its learning rate is, "" where that is not published.
    """

    source: str
    batch: str = ""
    families: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    train: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainingRecipes:
    recipe: tuple[TrainingRecipe, ...]


@cache
def list_recipes() -> tuple[TrainingRecipe, ...]:
    """Return the recipes in the order in which they are tried."""
    text = resources.files("moewright.exporters").joinpath(_TABLE).read_text(encoding="utf-8")
    return from_data(_TrainingRecipes, parse_toml(text, where=_TABLE), where=_TABLE).recipe


def find_recipe(model: ModelSpec) -> TrainingRecipe:
    """Return the recipe of a model, of its family, or what is usual."""
    # The last recipe is of any family.
    return next(
        recipe
        for recipe in list_recipes()
        if model.name in recipe.models or not {model.family, _ANY}.isdisjoint(recipe.families)
    )


def apply_recipe(workload: Workload, model: ModelSpec) -> Workload:
    """Return the workload with the recipe's values in fields that are at their defaults.

    A run shorter than twice the recipe's warm-up warms up for a tenth of it. Balancing losses are
    for models with experts, and stay out where the job has one or balances by a bias alone in the
    recipe.
    """
    values = dict(find_recipe(model).train)
    loss = workload.loss
    has_loss = any(getattr(loss, name) for name in _BALANCE)
    is_balanced = has_loss or (model.moe is not None and model.moe.router.selection_bias)
    for name in _BALANCE:
        # Beside a bias DeepSeek-V3 has a small loss within sequences.
        if model.moe is None or has_loss or (is_balanced and name != "seq_aux_coeff"):
            values.pop(name, None)
    if model.moe is None:
        values.pop("z_coeff", None)
    warmup = int(values.get("warmup_steps", 0))
    if workload.steps and workload.steps < 2 * warmup:
        values["warmup_steps"] = max(1, workload.steps // 10)
    for section in _SECTIONS:
        workload = replace(workload, **{section: _fill(getattr(workload, section), values)})
    return workload


def _fill(record: Any, values: Mapping[str, float]) -> Any:
    """Return a record with values in place of defaults, each in the type that the field has."""
    changed = {}
    for item in fields(record):
        default: Any = item.default
        if item.name in values and getattr(record, item.name) == default:
            changed[item.name] = type(default)(values[item.name])
    return replace(record, **changed)
