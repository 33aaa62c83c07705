"""Facts that a source states outside its table, or that are known of its software.

data/sources.toml states these facts, each with its evidence and the rows that it holds for:
cells that the source states elsewhere or implies, dtypes of gradients and moments, constants of
fused losses and weight copies, bytes that a device holds beyond the model, the load of an expert
rank under natural routing, and the age of a release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from moewright.codec import from_data, read_toml_data
from moewright.spec.hardware import Constant
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Dtype, Routing, Workload

_SOURCES = Path(__file__).parent / "data" / "sources.toml"
_MONTHS = 12
_MIDDLE_OF_YEAR = 6  # the month of a release of which only the year is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFact:
    """A fact about the rows whose cells contain a text of `when` and none of `unless`.

    `stated` and `implied` fill empty cells; an implied cell stays listed as not stated. `note` is
    shown with the row.
    """

    evidence: str
    when: dict[str, tuple[str, ...]]
    unless: dict[str, tuple[str, ...]] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    stated: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    grad_dtype: Dtype | None = None
    moment_dtype: Dtype | None = None
    note: str = ""

    def holds_for(self, cells: Mapping[str, str]) -> bool:
        return (
            all(_contains_any(cells[column], texts) for column, texts in self.when.items())
            and not any(
                _contains_any(cells[column], texts) for column, texts in self.unless.items()
            )
            and not any(cells[column] for column in self.empty)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceName:
    """A name that leaves open which part was measured, and the part that is taken for it."""

    written: str
    device: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseAge:
    """The release from which the age of software counts back, and the age at which it stops."""

    reference: str
    oldest_years: int
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NaturalRouting:
    """The load of the hottest expert rank where the router decides and no bias evens it out."""

    excess: float
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """The contents of data/sources.toml."""

    release_age: ReleaseAge
    natural_routing: NaturalRouting
    device: tuple[DeviceName, ...]
    fact: tuple[SourceFact, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedJob:
    """A workload completed by the known facts of its software, with constants and notes."""

    workload: Workload
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]


@cache
def source_facts() -> SourceFacts:
    """Read the facts that are shipped with the package."""
    return from_data(SourceFacts, read_toml_data(_SOURCES), where=_SOURCES.name)


def facts_for(cells: Mapping[str, str], model: ModelSpec) -> tuple[SourceFact, ...]:
    """Return the facts that hold for a row, in the order of the file."""
    row = {**cells, "model": model.name, "attention": model.attention.kind.value}
    return tuple(fact for fact in source_facts().fact if fact.holds_for(row))


def fill_stated(cells: Mapping[str, str], facts: Sequence[SourceFact]) -> dict[str, str]:
    """Fill empty cells with what the source states outside its table.

    A publisher that neither says is the part of the row's id before its number.
    """
    by_id = {"publisher": cells["id"].rpartition("-")[0]}
    return _fill(cells, [*(fact.stated for fact in facts), by_id])


def fill_implied(cells: Mapping[str, str], facts: Sequence[SourceFact]) -> dict[str, str]:
    """Fill empty cells with what follows from the source."""
    return _fill(cells, [fact.implied for fact in facts])


def find_device_name(written: str) -> DeviceName | None:
    """Return the entry of a hardware name that leaves the part open; None for any other name."""
    return next((name for name in source_facts().device if name.written == written), None)


def apply_software_facts(
    cells: Mapping[str, str],
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    facts: Sequence[SourceFact],
) -> CompletedJob:
    """Complete a row's job with what is known of its software beyond its cells."""
    age_years = release_age_years(cells["date_release"])
    constants = {"stack_age_years": _constant("stack_age_years", age_years, "date of its release")}
    notes = [fact.note for fact in facts if fact.note]
    for fact in facts:
        for name, value in fact.constants.items():
            constants[name] = _constant(name, value, fact.evidence)
        if fact.grad_dtype is not None:
            workload = replace(workload, grad_dtype=fact.grad_dtype)
        if fact.moment_dtype is not None:
            optimizer = replace(workload.optimizer, moment_dtype=fact.moment_dtype)
            workload = replace(workload, optimizer=optimizer)
    if _has_uneven_load(model, workload, layout):
        load_factor = _natural_load_factor(model, layout)
        workload = replace(workload, load_factor=load_factor)
        notes.append(f"natural routing: hottest rank taken at {load_factor:.2f} x the mean")
    return CompletedJob(workload=workload, constants=tuple(constants.values()), notes=tuple(notes))


def release_age_years(released: str) -> float:
    """Return the years from a release ("26.04.01", "2025-11", "2025") to the reference release.

    A release after the reference, or text that is no date, has age 0; the oldest count as
    `oldest_years` of data/sources.toml.
    """
    age = source_facts().release_age
    reference = _month_number(age.reference)
    month = _month_number(released)
    if month is None or reference is None:
        return 0.0
    return min(max(reference - month, 0), _MONTHS * age.oldest_years) / _MONTHS


def _month_number(date: str) -> int | None:
    """Return the months from 2000 to a date; None where the text begins with none."""
    match = re.match(r"(?:20)?(\d\d)(?:[.-](\d\d))?", date)
    if not match:
        return None
    month = int(match[2]) - 1 if match[2] else _MIDDLE_OF_YEAR
    return _MONTHS * int(match[1]) + month


def _fill(cells: Mapping[str, str], values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    filled = dict(cells)
    for source_cells in values:
        filled |= {column: text for column, text in source_cells.items() if not filled[column]}
    return filled


def _contains_any(cell: str, texts: Sequence[str]) -> bool:
    return any(text in cell for text in texts)


def _has_uneven_load(model: ModelSpec, workload: Workload, layout: Layout) -> bool:
    if workload.routing is not Routing.LEARNED or not model.moe or layout.ep == 1:
        return False
    return not model.moe.router.selection_bias


def _natural_load_factor(model: ModelSpec, layout: Layout) -> float:
    """Return the rows of the hottest expert rank over the mean; ep where it gets all rows."""
    if model.moe is None:
        return 1.0
    excess = source_facts().natural_routing.excess
    return min(1 + excess * layout.ep / model.moe.experts, layout.ep)


def _constant(name: str, value: float, evidence: str) -> Constant:
    sourced = Sourced(value=value, kind=SourceKind.FITTED, source=evidence)
    return Constant(name=name, value=sourced)
