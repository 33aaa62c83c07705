"""Write docs/reference/families.md: which families of models are planned, trained and converted.

A row says what the code says of the published sizes in the catalogue: whether config.json is read,
what the engine lacks, and whether weights go out again. `make docs` runs it, and a test compares
the page with what it would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.families.table import FAMILIES
from moewright.intake import catalogue
from moewright.intake.hf import build_config
from moewright.rules.limits.engine_features import unsupported_features
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec

PAGE = Path(__file__).parents[1] / "reference" / "families.md"

_INTRODUCTION = """# Families of models

By the `model_type` of config.json. *Plan*: `plan`, `estimate` and `search` know its parameters,
memory and time. *Engine*: all of its parts train here, or what is missing. *Weights*: Hugging Face
weights go in, and out again byte for byte; tiny models of these families equal transformers' in
logits, losses and every gradient (`spawn/test_verify.py`, `spawn/test_verify_families.py`). Ling
and Ring, of which transformers has no class, equal its GLM-4.5 and Granite under other names. Where
weights do not go in, the engine trains from fresh ones, and nobody else's code was compared.
This page is made from the code.

| model_type | published sizes | plan | engine | weights |
|---|---|---|---|---|
"""
_SHOWN_MODELS = 3
# Depths that the engine lacks are left out where a folder's weights are read.
_DEPTHS = "mtp_layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """What is done of one family: `missing` are features that the engine has not.

    `lacking` are the sizes that have one of them; weights are those of the others. Sizes that lack
    their MTP depths alone train without, and are none of them.
    """

    family: str
    models: tuple[str, ...]
    missing: tuple[str, ...]
    lacking: tuple[str, ...]
    has_weights: bool


def list_families() -> tuple[FamilyRow, ...]:
    """Return a row for each family that has a published size in the catalogue."""
    by_family: dict[str, list[str]] = {}
    for name in catalogue.model_names():
        by_family.setdefault(catalogue.model(name).family, []).append(name)
    rows = []
    for family in sorted(by_family.keys() & FAMILIES.keys()):
        models = [catalogue.model(name) for name in by_family[family]]
        missing = sorted({field for model in models for field in _list_missing(model)})
        run = [model for model in models if not {*_list_missing(model)} - {_DEPTHS}]
        rows.append(
            FamilyRow(
                family=family,
                models=tuple(by_family[family]),
                missing=tuple(missing),
                lacking=tuple(model.name for model in models if model not in run),
                has_weights=bool(run) and all(map(_is_written, run)),
            )
        )
    return tuple(rows)


def render_page() -> str:
    """Return the page."""
    rows = list_families()
    text = _INTRODUCTION + "".join(map(_format_row, rows))
    others = sorted(FAMILIES.keys() - {row.family for row in rows})
    names = ", ".join(f"`{name}`" for name in others)
    return (
        f"{text}\nConfigurations of {names} are read too; no published size of theirs is listed.\n"
    )


def _list_missing(model: ModelSpec) -> Iterator[str]:
    for field, _, is_missing, _ in unsupported_features(model):
        if is_missing:
            yield field


def _is_written(model: ModelSpec) -> bool:
    try:
        build_config(replace(model, mtp_layers=0) if _DEPTHS in _list_missing(model) else model)
    except BadInput:
        return False
    return True


def _format_row(row: FamilyRow) -> str:
    names = [name.rpartition("/")[2] for name in row.models]
    lacking = [name.rpartition("/")[2] for name in row.lacking]
    shown = ", ".join(names[:_SHOWN_MODELS])
    if len(names) > _SHOWN_MODELS:
        shown += f" and {len(names) - _SHOWN_MODELS} more"
    engine = "yes"
    if row.missing:
        where = "" if lacking == names else f" in {', '.join(lacking)}"
        engine = f"not yet{where}: " + ", ".join(f"`{field}`" for field in row.missing)
    if row.missing == (_DEPTHS,):
        engine = f"yes, without `{_DEPTHS}`"
    weights = "in and out" if row.has_weights else "no"
    return f"| `{row.family}` | {shown} | yes | {engine} | {weights} |\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
