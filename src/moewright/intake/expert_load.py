"""A measured expert load: tokens an expert of every layer that has experts, from a file or from a
run's own record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from moewright.codec import closest_match, read_json_data, read_run, read_text
from moewright.spec.errors import BadInput, Reason

ExpertCounts = tuple[tuple[int, ...], ...]

_LONG = ("layer", "expert", "tokens")  # the header of a table with a line a layer and expert
_KINDS = (".json", ".csv")


def read_expert_load(path: Path) -> ExpertCounts:
    """Counts by layer and expert.

    A .json file holds a list of layers, each a list of counts; a .csv file a line of counts a
    layer, or under the header layer,expert,tokens a line a count, where experts that are left out
    got none; a folder is a run, whose recorded steps are summed. Raises BadInput.
    """
    if path.is_dir():
        return _of_run(path)
    if path.suffix not in _KINDS:
        rule = "must be a .json or .csv file, or the folder of a run"
        raise BadInput(
            Reason(
                field="--load",
                value=str(path),
                rule=rule,
                nearest=closest_match(path.suffix, _KINDS),
            )
        )
    if path.suffix == ".json":
        return _layers(read_json_data(path), str(path))
    lines = [
        (number, line.split(","))
        for number, line in enumerate(read_text(path).splitlines(), 1)
        if line.strip()
    ]
    if lines and tuple(cell.strip().casefold() for cell in lines[0][1]) == _LONG:
        return _long(path, lines[1:])
    return tuple(
        tuple(_count(cell, f"{path}:{number}") for cell in cells) for number, cells in lines
    )


def _layers(data: Any, where: str) -> ExpertCounts:
    if not isinstance(data, list) or not all(isinstance(layer, list) for layer in data):
        raise BadInput(Reason(field=where, rule="must be a list of layers, each a list of counts"))
    return tuple(
        tuple(_count(value, f"{where}[{layer}][{expert}]") for expert, value in enumerate(counts))
        for layer, counts in enumerate(data)
    )


def _long(path: Path, lines: list[tuple[int, list[str]]]) -> ExpertCounts:
    counts: Counter[tuple[int, int]] = Counter()
    for number, cells in lines:
        where = f"{path}:{number}"
        if len(cells) != len(_LONG):
            raise BadInput(
                Reason(field=where, value=f"{len(cells)} cells", rule=f"needs {', '.join(_LONG)}")
            )
        layer, expert, tokens = (_count(cell, where) for cell in cells)
        counts[layer, expert] += tokens
    experts = range(1 + max((expert for _, expert in counts), default=-1))
    layers = sorted({layer for layer, _ in counts})
    return tuple(tuple(counts[layer, expert] for expert in experts) for layer in layers)


def _count(value: Any, where: str) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 19) or isinstance(value, bool):
        raise BadInput(
            Reason(field=where, value=text[:40], rule="must be a count, a whole number from 0")
        )
    return int(text)


def _of_run(path: Path) -> ExpertCounts:
    """All steps that a run logged its routers on, of the layers below the MTP depths."""
    record = read_run(path)
    sums: dict[int, Counter[int]] = {}
    for load in (
        load
        for step in record.steps
        for load in step.loads
        if load.layer < record.plan.model.layers
    ):
        sums.setdefault(load.layer, Counter()).update(dict(enumerate(load.counts)))
    if not sums:
        raise BadInput(
            Reason(field="--load", value=str(path), rule="the run recorded no loads of experts")
        )
    return tuple(
        tuple(sums[layer][expert] for expert in sorted(sums[layer])) for layer in sorted(sums)
    )
