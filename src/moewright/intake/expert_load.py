"""A measured expert load: the tokens each expert got, by layer, from a file or a run's record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from moewright.codec import closest_match, read_json_data, read_run, read_text
from moewright.spec.errors import BadInput, Reason

ExpertCounts = tuple[tuple[int, ...], ...]  # by layer that has experts, then by expert

_LONG_HEADER = ("layer", "expert", "tokens")  # of a table with a line a layer and expert
_SUFFIXES = (".json", ".csv")

_Row = tuple[int, list[str]]  # a line's number and its cells


def read_expert_load(path: Path) -> ExpertCounts:
    """Read counts by layer and expert.

    A .json file holds a list of layers, each a list of counts. A .csv file has a line of counts a
    layer; or, under the header layer,expert,tokens, a line a count, where experts that are left out
    got none. A folder is a run, whose recorded steps are summed.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    if path.is_dir():
        return _read_run_counts(path)
    if path.suffix not in _SUFFIXES:
        rule = "must be a .json or .csv file, or the folder of a run"
        nearest = closest_match(path.suffix, _SUFFIXES)
        raise BadInput(Reason(field="--load", value=str(path), rule=rule, nearest=nearest))
    if path.suffix == ".json":
        return _read_json_counts(read_json_data(path), str(path))
    lines = enumerate(read_text(path).splitlines(), 1)
    rows = [(number, line.split(",")) for number, line in lines if line.strip()]
    if rows and tuple(cell.strip().casefold() for cell in rows[0][1]) == _LONG_HEADER:
        return _read_long_table(path, rows[1:])
    return tuple(
        tuple(_read_count(cell, f"{path}:{number}") for cell in cells) for number, cells in rows
    )


def _read_json_counts(data: Any, where: str) -> ExpertCounts:
    if not isinstance(data, list) or not all(isinstance(layer, list) for layer in data):
        raise BadInput(Reason(field=where, rule="must be a list of layers, each a list of counts"))
    return tuple(
        tuple(
            _read_count(value, f"{where}[{layer}][{expert}]") for expert, value in enumerate(counts)
        )
        for layer, counts in enumerate(data)
    )


def _read_long_table(path: Path, rows: list[_Row]) -> ExpertCounts:
    counts: Counter[tuple[int, int]] = Counter()
    for number, cells in rows:
        where = f"{path}:{number}"
        if len(cells) != len(_LONG_HEADER):
            rule = f"needs {', '.join(_LONG_HEADER)}"
            raise BadInput(Reason(field=where, value=f"{len(cells)} cells", rule=rule))
        layer, expert, tokens = (_read_count(cell, where) for cell in cells)
        counts[layer, expert] += tokens
    experts = range(1 + max((expert for _, expert in counts), default=-1))
    layers = sorted({layer for layer, _ in counts})
    return tuple(tuple(counts[layer, expert] for expert in experts) for layer in layers)


def _read_count(value: Any, where: str) -> int:
    text = str(value).strip()
    is_digits = text.isascii() and text.isdecimal() and len(text) < 19
    if not is_digits or isinstance(value, bool):
        rule = "must be a count, a whole number from 0"
        raise BadInput(Reason(field=where, value=text[:40], rule=rule))
    return int(text)


def _read_run_counts(path: Path) -> ExpertCounts:
    """Sum the counts of all steps whose routers a run logged, without the layers of MTP."""
    record = read_run(path)
    sums: dict[int, Counter[int]] = {}
    for step in record.steps:
        for load in step.loads:
            if load.layer < record.plan.model.layers:
                sums.setdefault(load.layer, Counter()).update(dict(enumerate(load.counts)))
    if not sums:
        rule = "the run recorded no loads of experts"
        raise BadInput(Reason(field="--load", value=str(path), rule=rule))
    return tuple(
        tuple(sums[layer][expert] for expert in sorted(sums[layer])) for layer in sorted(sums)
    )
