"""Facts that a source states outside its table, or that are known of its software.

data/sources.toml states these facts, each with its evidence and the rows that it holds for:
cells that the source states elsewhere or implies, dtypes of gradients and moments, constants of
fused losses and weight copies, bytes that a device holds beyond the model, and the age of a
release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from moewright.codec import from_data, read_toml_data
from moewright.rules.expert_load import expected_load, has_natural_load
from moewright.rules.job import Job
from moewright.spec.hardware import Constant
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import (
    AdapterTarget,
    AttentionBackend,
    Bf16Products,
    DocumentMasking,
    Dtype,
    ExpertKernels,
    Fusion,
    NarrowedProducts,
    Workload,
)

_SOURCES = Path(__file__).parent / "data" / "sources.toml"
_MONTHS = 12  # in a year
_MIDDLE_OF_YEAR = 6  # the month of a release of which only the year is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFact:
    """A fact about the rows whose cells contain a text of `when` and none of `unless`.

    `corrected` are cells that the table has wrong, as the source's own scripts show. `stated` and
    `implied` fill empty cells; an implied cell stays listed as not stated. `note` is shown with the
    row.
    """

    evidence: str
    when: dict[str, tuple[str, ...]]
    unless: dict[str, tuple[str, ...]] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    corrected: dict[str, str] = field(default_factory=dict)
    stated: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    grad_dtype: Dtype | None = None
    moment_dtype: Dtype | None = None
    unfused: tuple[Fusion, ...] = ()
    attention_backend: AttentionBackend | None = None
    expert_kernels: ExpertKernels | None = None
    narrowed: tuple[NarrowedProducts, ...] = ()
    bf16_last_layers: int = 0
    bf16_products: tuple[Bf16Products, ...] = ()
    lora_targets: tuple[AdapterTarget, ...] = ()
    lora_experts: bool = False
    attended_share: float = 1.0
    note: str = ""

    def holds_for(self, cells: Mapping[str, str]) -> bool:
        is_open = not any(cells[column] for column in self.empty)
        return is_open and matches(cells, self.when, self.unless)


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
class DeviceMonitor:
    """The bytes that a monitor of the whole device reads beside what a peak is made of."""

    extra_bytes: float
    extra_bytes_sd: float
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpread:
    """The trainers whose runs the constants were fitted to, and what others are off by.

    `log_sd` is the deviation of the logarithm of a trainer's seconds that all its runs share.
    """

    frameworks: tuple[str, ...]
    log_sd: float
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Cells that a source may have meant, and how likely that is."""

    share: float
    cells: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """What is likely of switches that the rows of a software line do not state.

    `when` and `unless` are those of a fact.
    """

    evidence: str
    when: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unless: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...]

    def holds_for(self, cells: Mapping[str, str]) -> bool:
        return matches(cells, self.when, self.unless)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """The contents of data/sources.toml."""

    release_age: ReleaseAge
    device_monitor: DeviceMonitor
    stack_spread: StackSpread
    device: tuple[DeviceName, ...]
    fact: tuple[SourceFact, ...]
    inference: tuple[Inference, ...]


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
    """Return the facts that hold for a row, in the order of the file.

    A fact sees the cells as the facts before it correct and state them.
    """
    own = {"model": model.name, "attention": model.attention.kind.value}
    row = {**cells, **own}
    facts: list[SourceFact] = []
    for fact in source_facts().fact:
        if fact.holds_for(row):
            facts.append(fact)
            row = {**_state(row, fact), **own}
    return tuple(facts)


def fill_stated(cells: Mapping[str, str], facts: Sequence[SourceFact]) -> dict[str, str]:
    """Correct wrong cells, and fill empty ones with what the source states outside its table.

    A publisher that neither says is the part of the row's id before its number, a framework that
    neither says is the publisher's.
    """
    stated = dict(cells)
    for fact in facts:
        stated = _state(stated, fact)
    named = _fill(stated, [{"publisher": cells["id"].rpartition("-")[0]}])
    return _fill(named, [{"framework": named["publisher"]}])


def _state(cells: Mapping[str, str], fact: SourceFact) -> dict[str, str]:
    return _fill({**cells, **fact.corrected}, [fact.stated])


def fill_implied(cells: Mapping[str, str], facts: Sequence[SourceFact]) -> dict[str, str]:
    """Fill empty cells with what follows from the source."""
    return _fill(cells, [fact.implied for fact in facts])


def infer_cells(
    cells: Mapping[str, str], model: ModelSpec, *, is_full: bool
) -> tuple[tuple[float, dict[str, str]], ...]:
    """Return what the empty cells of a row may say, with how likely that is, likeliest first.

    A row without a source is one of the user's own, whose empty cells are defaults. A rule may ask
    for `moe` (yes, no) and `stated` (full, part: whether all that decides the speed is stated)
    beside the columns. A cell that a rule fills is left alone by the rules after it.
    """
    row = {
        **cells,
        "model": model.name,
        "attention": model.attention.kind.value,
        "moe": "yes" if model.moe else "no",
        "stated": "full" if is_full else "part",
    }
    guesses: list[tuple[float, dict[str, str]]] = [(1.0, {})]
    if not cells["source"]:
        return tuple(guesses)
    for rule in source_facts().inference:
        if rule.holds_for(row):
            guesses = [
                (share * alternative.share, _fill_guess(cells, guess, alternative.cells))
                for share, guess in guesses
                for alternative in rule.alternatives
            ]
    shares: dict[frozenset[tuple[str, str]], float] = {}
    for share, guess in guesses:
        key = frozenset(guess.items())
        shares[key] = shares.get(key, 0.0) + share
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return tuple((share, dict(key)) for key, share in ordered)


def _fill_guess(
    cells: Mapping[str, str], guess: Mapping[str, str], values: Mapping[str, str]
) -> dict[str, str]:
    new = {
        column: text for column, text in values.items() if not cells[column] and column not in guess
    }
    return {**guess, **new}


def stack_log_sd(cells: Mapping[str, str]) -> float:
    """Return the deviation that the trainer of a row adds; 0 where runs of it were fitted.

    A row without a source is one of the user's own, whose trainer nobody names.
    """
    spread = source_facts().stack_spread
    if not cells.get("source") or cells["framework"] in spread.frameworks:
        return 0.0
    return spread.log_sd


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
        if fact.unfused:
            trainer = replace(workload.trainer, unfused=fact.unfused)
            workload = replace(workload, trainer=trainer)
        if fact.attention_backend is not None:
            trainer = replace(workload.trainer, attention_backend=fact.attention_backend)
            workload = replace(workload, trainer=trainer)
        if fact.expert_kernels is not None:
            trainer = replace(workload.trainer, expert_kernels=fact.expert_kernels)
            workload = replace(workload, trainer=trainer)
        if fact.narrowed or fact.bf16_last_layers or fact.bf16_products:
            trainer = replace(
                workload.trainer,
                narrowed=fact.narrowed,
                bf16_last_layers=fact.bf16_last_layers,
                bf16_products=fact.bf16_products,
            )
            workload = replace(workload, trainer=trainer)
        if fact.lora_targets:
            fine_tuning = replace(workload.fine_tuning, lora_targets=fact.lora_targets)
            workload = replace(workload, fine_tuning=fine_tuning)
        if fact.lora_experts:
            fine_tuning = replace(workload.fine_tuning, lora_experts=True)
            workload = replace(workload, fine_tuning=fine_tuning)
        if fact.attended_share < 1:
            data = replace(
                workload.data,
                documents=DocumentMasking.BOUNDED,
                attended_share=fact.attended_share,
            )
            workload = replace(workload, data=data)
        if fact.moment_dtype is not None:
            optimizer = replace(workload.optimizer, moment_dtype=fact.moment_dtype)
            workload = replace(workload, optimizer=optimizer)
    job = Job(model=model, workload=workload, layout=layout)
    if has_natural_load(workload) and model.moe is not None:
        load = expected_load(job).step
        notes.append(f"natural routing: hottest rank taken at {load:.2f} x the mean")
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


def matches(
    cells: Mapping[str, str],
    when: Mapping[str, Sequence[str]],
    unless: Mapping[str, Sequence[str]],
) -> bool:
    """Return whether cells have a text of each column of `when`, and none of `unless`."""
    return all(
        _contains_any(cells.get(column, ""), texts) for column, texts in when.items()
    ) and not any(_contains_any(cells.get(column, ""), texts) for column, texts in unless.items())


def _contains_any(cell: str, texts: Sequence[str]) -> bool:
    return any(text in cell for text in texts)


def _constant(name: str, value: float, evidence: str) -> Constant:
    sourced = Sourced(value=value, kind=SourceKind.FITTED, source=evidence)
    return Constant(name=name, value=sourced)
