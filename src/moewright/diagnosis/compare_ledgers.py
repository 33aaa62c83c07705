"""Comparison of two ledgers, line by line: what was predicted and what the engine counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from moewright.cost.ledger import predict_ledger
from moewright.spec.errors import BadInput, Reason
from moewright.spec.ledger import Component, Ledger, Module, StorageMoment, StorageRow
from moewright.spec.run import RunRecord

SAVED_BOUND = 0.03  # saved activations in total: |predicted - counted| / counted
EXACT_COMPONENTS = frozenset(
    {Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS, Component.HOST}
)
SAVED_COMPONENTS = frozenset({Component.ACTIVATIONS, Component.LOGITS})
TOTAL = "total"

LedgerColumn: TypeAlias = Mapping[tuple[str, ...], float]


class Section(StrEnum):
    """The sections of a comparison."""

    MEMORY = "memory"  # bytes held
    STORAGES = "storages"  # bytes of all storages that live at a moment
    COMM = "comm"  # payload bytes a step
    CALLS = "calls"  # collective calls a step
    IN_FLIGHT = "in_flight"  # most chunks of micro-batches alive at once
    FLOPS = "flops"  # a step
    TIME = "time"  # seconds of a step


class AgreementRule(StrEnum):
    """The agreement that a line promises between prediction and count."""

    EXACT = "exact"  # equality
    BOUND = "bound"  # a difference of at most SAVED_BOUND
    ALLOWANCE = "allowance"  # no less than predicted, and no more than that and the allowance
    LISTED = "listed"  # nothing: it is there to be read


class LineStatus(StrEnum):
    """How the two sides of a line compare."""

    EQUAL = "equal"
    WITHIN = "within"  # not equal, but inside the bound or the allowance
    DIFFERS = "differs"
    ONLY_PREDICTED = "only_predicted"
    ONLY_COUNTED = "only_counted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """A quantity of both ledgers in the unit of its section; a side without the row holds 0.

    `keeps_rule` is the verdict: whether the line keeps what its rule promises; a listed line
    promises nothing. `allowance` is what a rule of this name allows beyond the prediction.
    """

    section: Section
    key: tuple[str, ...]
    rule: AgreementRule
    predicted: float
    counted: float
    status: LineStatus
    keeps_rule: bool
    allowance: float = 0.0

    @property
    def difference(self) -> float:
        return self.predicted - self.counted

    @property
    def relative_difference(self) -> float | None:
        """Return the difference over the counted value; None where nothing was counted."""
        return self.difference / self.counted if self.counted else None

    @property
    def label(self) -> str:
        return format_key(self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerComparison:
    """All lines of one rank's two ledgers, and what either side noted."""

    rank: int
    pp_rank: int
    lines: tuple[LedgerLine, ...]
    notes: tuple[str, ...]
    # What no row lists, as the engine's census found it: the largest first, by moment.
    unlisted: tuple[StorageRow, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Return whether every line that must be equal is."""
        return all(line.keeps_rule for line in self.lines if line.rule is AgreementRule.EXACT)

    @property
    def is_within_bound(self) -> bool:
        """Return whether saved activations stay within their bound in total."""
        return all(line.keeps_rule for line in self.lines if line.rule is AgreementRule.BOUND)

    @property
    def is_accounted(self) -> bool:
        """Return whether all storages are accounted for: rows list them, or an allowance does."""
        return all(line.keeps_rule for line in self.lines if line.rule is AgreementRule.ALLOWANCE)

    @property
    def keeps_rules(self) -> bool:
        """Return whether every line keeps what its rule promises."""
        return all(line.keeps_rule for line in self.lines)

    def lines_in(self, section: Section) -> tuple[LedgerLine, ...]:
        return tuple(line for line in self.lines if line.section is section)


def format_key(key: tuple[str, ...]) -> str:
    """Return the key of a row in words."""
    return " / ".join(word.replace("_", " ") for word in key)


def compare_ledgers(predicted: Ledger, counted: Ledger) -> LedgerComparison:
    """Join two ledgers of one rank on their keys.

    Weights, gradients, master and moments, collective bytes and calls, FLOPs, and in-flight counts
    must be equal; saved activations (with the logits among them) stay within SAVED_BOUND in total
    and are listed by module; all storages that live at a moment are those of the rows, and what may
    lie beside them; other memory and time are listed.

    Raises:
        BadInput: the ledgers are of different ranks.
    """
    _require_same_rank("rank", predicted.rank, counted.rank)
    _require_same_rank("pp_rank", predicted.pp_rank, counted.pp_rank)
    exact = AgreementRule.EXACT
    lines = (
        *_memory_lines(predicted, counted),
        *_storage_lines(predicted, counted),
        *_join(Section.COMM, exact, _comm_bytes(predicted), _comm_bytes(counted)),
        *_join(Section.CALLS, exact, _comm_calls(predicted), _comm_calls(counted)),
        *_flop_lines(predicted, counted),
        *_in_flight_lines(predicted, counted),
        *_time_lines(predicted, counted),
    )
    notes = tuple(dict.fromkeys((*predicted.notes, *counted.notes)))
    return LedgerComparison(
        rank=counted.rank,
        pp_rank=counted.pp_rank,
        lines=lines,
        notes=notes,
        unlisted=counted.unlisted,
    )


def list_quantities(ledger: Ledger) -> dict[Section, LedgerColumn]:
    """List what a ledger holds, sends and computes, by section and key."""
    return {
        Section.MEMORY: _memory_bytes(ledger, Component),
        Section.COMM: _comm_bytes(ledger),
        Section.CALLS: _comm_calls(ledger),
        Section.FLOPS: _flops(ledger),
    }


def compare_ranks(record: RunRecord) -> tuple[LedgerComparison, ...]:
    """Compare every rank's count with its prediction under the routing that the run recorded."""
    return tuple(
        compare_ledgers(
            predict_ledger(record.plan, rank=counted.rank, selection=record.selection), counted
        )
        for counted in record.ledgers
    )


def _require_same_rank(field: str, predicted: int, counted: int) -> None:
    if predicted != counted:
        rule = "predicted and counted ledgers must be of the same rank"
        raise BadInput(
            Reason(field=f"ledger.{field}", value=str(predicted), rule=rule, nearest=str(counted))
        )


def _compare_values(predicted: float, counted: float) -> LineStatus:
    if predicted == counted:
        return LineStatus.EQUAL
    if not counted:
        return LineStatus.ONLY_PREDICTED
    if not predicted:
        return LineStatus.ONLY_COUNTED
    return _judge(is_within=abs(predicted - counted) <= SAVED_BOUND * abs(counted))


def _judge(*, is_within: bool) -> LineStatus:
    return LineStatus.WITHIN if is_within else LineStatus.DIFFERS


def _line(
    section: Section,
    rule: AgreementRule,
    key: tuple[str, ...],
    predicted: float,
    counted: float,
    *,
    allowance: float = 0.0,
) -> LedgerLine:
    status = _compare_values(predicted, counted)
    if rule is AgreementRule.EXACT and status is LineStatus.WITHIN:
        status = LineStatus.DIFFERS  # near is not equal
    elif rule is AgreementRule.ALLOWANCE and status is not LineStatus.EQUAL:
        status = _judge(is_within=predicted <= counted <= predicted + allowance)
    kept = {AgreementRule.EXACT: (LineStatus.EQUAL,), AgreementRule.LISTED: tuple(LineStatus)}
    return LedgerLine(
        section=section,
        key=key,
        rule=rule,
        predicted=predicted,
        counted=counted,
        status=status,
        keeps_rule=status in kept.get(rule, (LineStatus.EQUAL, LineStatus.WITHIN)),
        allowance=allowance,
    )


def _join(
    section: Section, rule: AgreementRule, predicted: LedgerColumn, counted: LedgerColumn
) -> Iterator[LedgerLine]:
    for key in dict.fromkeys((*predicted, *counted)):
        yield _line(section, rule, key, predicted.get(key, 0), counted.get(key, 0))


def _memory_lines(predicted: Ledger, counted: Ledger) -> Iterator[LedgerLine]:
    for component in Component:
        is_exact = component in EXACT_COMPONENTS
        rule = AgreementRule.EXACT if is_exact else AgreementRule.LISTED
        yield from _join(
            Section.MEMORY,
            rule,
            _memory_bytes(predicted, (component,)),
            _memory_bytes(counted, (component,)),
        )
    predicted_saved = sum(_memory_bytes(predicted, SAVED_COMPONENTS).values())
    counted_saved = sum(_memory_bytes(counted, SAVED_COMPONENTS).values())
    if predicted_saved or counted_saved:
        key = ("saved activations", TOTAL)
        yield _line(Section.MEMORY, AgreementRule.BOUND, key, predicted_saved, counted_saved)


def _memory_bytes(ledger: Ledger, components: Iterable[Component]) -> LedgerColumn:
    kept = frozenset(components)
    return {
        (row.component.value, row.module.value): row.bytes
        for row in ledger.memory
        if row.component in kept
    }


def _storage_lines(predicted: Ledger, counted: Ledger) -> Iterator[LedgerLine]:
    """Yield the bytes of all storages at each moment, where they were weighed."""
    least, most, weighed = predicted.storages, predicted.allowance, counted.storages
    if least is None or most is None or weighed is None:
        return
    for moment in StorageMoment:
        nbytes = weighed.at(moment)
        if nbytes:  # a file of an earlier version does not have all moments
            yield _line(
                Section.STORAGES,
                AgreementRule.ALLOWANCE,
                ("all storages", moment.value),
                least.at(moment),
                nbytes,
                allowance=most.at(moment),
            )


def _in_flight_lines(predicted: Ledger, counted: Ledger) -> Iterator[LedgerLine]:
    """Yield the line of the count, which is at least 1; nothing where a ledger does not hold it."""
    if predicted.in_flight and counted.in_flight:
        yield _line(
            Section.IN_FLIGHT,
            AgreementRule.EXACT,
            ("chunks", "peak"),
            predicted.in_flight,
            counted.in_flight,
        )


def _comm_bytes(ledger: Ledger) -> LedgerColumn:
    return {(row.op.value, row.group): row.bytes for row in ledger.comm}


def _comm_calls(ledger: Ledger) -> LedgerColumn:
    return {(row.op.value, row.group): row.calls for row in ledger.comm}


def _flop_lines(predicted: Ledger, counted: Ledger) -> Iterator[LedgerLine]:
    exact = AgreementRule.EXACT
    yield from _join(Section.FLOPS, exact, _flops(predicted), _flops(counted))
    predicted_flops = _model_flops(predicted)
    counted_flops = _model_flops(counted)
    if predicted_flops or counted_flops:
        key = ("model FLOPs", "all but router")
        yield _line(Section.FLOPS, exact, key, predicted_flops, counted_flops)


def _flops(ledger: Ledger) -> LedgerColumn:
    return {(row.op.value, row.module.value): row.flops for row in ledger.flops}


def _model_flops(ledger: Ledger) -> int:
    return sum(row.flops for row in ledger.flops if row.module is not Module.ROUTER)


def _time_lines(predicted: Ledger, counted: Ledger) -> Iterator[LedgerLine]:
    listed = AgreementRule.LISTED
    predicted_s = _phase_seconds(predicted)
    counted_s = _phase_seconds(counted)
    yield from _join(Section.TIME, listed, predicted_s, counted_s)
    if predicted_s or counted_s:
        total_predicted_s = sum(predicted_s.values())
        total_counted_s = sum(counted_s.values())
        yield _line(Section.TIME, listed, (TOTAL,), total_predicted_s, total_counted_s)


def _phase_seconds(ledger: Ledger) -> LedgerColumn:
    return {(row.phase.value,): row.seconds for row in ledger.time}
