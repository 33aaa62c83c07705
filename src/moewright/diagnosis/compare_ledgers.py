"""Subtract two ledgers: what the planner predicted and what the engine counted, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from moewright.cost.ledger import predict_ledger
from moewright.spec.errors import BadInput, Reason
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.run import RunRecord

SAVED_BOUND = 0.03  # saved activations in total: |predicted - counted| / counted
EXACT_COMPONENTS = frozenset(
    {Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS, Component.HOST}
)
SAVED_COMPONENTS = frozenset({Component.ACTIVATIONS, Component.LOGITS})
TOTAL = "total"


class Section(StrEnum):
    MEMORY = "memory"  # bytes held
    COMM = "comm"  # payload bytes a step
    CALLS = "calls"  # collective calls a step
    IN_FLIGHT = "in_flight"  # most chunks of micro-batches alive at once
    FLOPS = "flops"  # a step
    TIME = "time"  # seconds of a step


class AgreementRule(StrEnum):
    """What a line promises: equality, a bound of 3%, or nothing (it is listed to be read)."""

    EXACT = "exact"
    BOUND = "bound"
    LISTED = "listed"


class LineStatus(StrEnum):
    EQUAL = "equal"
    WITHIN = "within"  # not equal, but inside the bound
    DIFFERS = "differs"
    ONLY_PREDICTED = "only_predicted"
    ONLY_COUNTED = "only_counted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """One quantity of both ledgers, in the unit of its section; a side without the row holds 0."""

    section: Section
    key: tuple[str, ...]
    rule: AgreementRule
    predicted: float
    counted: float
    status: LineStatus

    @property
    def difference(self) -> float:
        return self.predicted - self.counted

    @property
    def relative_difference(self) -> float | None:
        """Difference over counted; None where nothing was counted."""
        return self.difference / self.counted if self.counted else None

    @property
    def label(self) -> str:
        return " / ".join(word.replace("_", " ") for word in self.key)

    @property
    def keeps_rule(self) -> bool:
        """Whether the line keeps what its rule promises; a listed line promises nothing."""
        if self.rule is AgreementRule.EXACT:
            return self.status is LineStatus.EQUAL
        return self.rule is AgreementRule.LISTED or self.status in (
            LineStatus.EQUAL,
            LineStatus.WITHIN,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerComparison:
    """All lines of one rank's two ledgers, and what either side noted."""

    rank: int
    pp_rank: int
    lines: tuple[LedgerLine, ...]
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every line that must be equal is."""
        return all(line.keeps_rule for line in self.lines if line.rule is AgreementRule.EXACT)

    @property
    def is_within_bound(self) -> bool:
        """Whether saved activations stay within their bound in total."""
        return all(line.keeps_rule for line in self.lines if line.rule is AgreementRule.BOUND)

    def lines_in(self, section: Section) -> tuple[LedgerLine, ...]:
        return tuple(line for line in self.lines if line.section is section)


def compare_ledgers(predicted: Ledger, counted: Ledger) -> LedgerComparison:
    """Join two ledgers of one rank on their keys.

    Weights, gradients, master and moments, collective bytes and calls, FLOPs, and in-flight counts
    must be equal; saved activations (with the logits among them) stay within 3% in total and are
    listed by module; other memory and time are listed. Raises BadInput when the ledgers are of
    different ranks.
    """
    for field in ("rank", "pp_rank"):
        ours, theirs = getattr(predicted, field), getattr(counted, field)
        if ours != theirs:
            rule = "predicted and counted ledgers must be of the same rank"
            raise BadInput(
                Reason(field=f"ledger.{field}", value=str(ours), rule=rule, nearest=str(theirs))
            )
    lines = (
        *_memory(predicted, counted),
        *_join(Section.COMM, AgreementRule.EXACT, _comm_bytes(predicted), _comm_bytes(counted)),
        *_join(Section.CALLS, AgreementRule.EXACT, _comm_calls(predicted), _comm_calls(counted)),
        *_flops(predicted, counted),
        *_in_flight(predicted, counted),
        *_time(predicted, counted),
    )
    notes = tuple(dict.fromkeys((*predicted.notes, *counted.notes)))
    return LedgerComparison(rank=counted.rank, pp_rank=counted.pp_rank, lines=lines, notes=notes)


def compare_ranks(record: RunRecord) -> tuple[LedgerComparison, ...]:
    """Every rank's count against what is predicted of it under the routing that the run
    recorded."""
    return tuple(
        compare_ledgers(
            predict_ledger(record.plan, rank=counted.rank, selection=record.selection), counted
        )
        for counted in record.ledgers
    )


def _status(predicted: float, counted: float) -> LineStatus:
    if predicted == counted:
        return LineStatus.EQUAL
    if not counted:
        return LineStatus.ONLY_PREDICTED
    if not predicted:
        return LineStatus.ONLY_COUNTED
    return (
        LineStatus.WITHIN
        if abs(predicted - counted) <= SAVED_BOUND * abs(counted)
        else LineStatus.DIFFERS
    )


def _line(
    section: Section, rule: AgreementRule, key: tuple[str, ...], predicted: float, counted: float
) -> LedgerLine:
    status = _status(predicted, counted)
    if rule is AgreementRule.EXACT and status is LineStatus.WITHIN:
        status = LineStatus.DIFFERS  # near is not equal
    return LedgerLine(
        section=section, key=key, rule=rule, predicted=predicted, counted=counted, status=status
    )


LedgerColumn: TypeAlias = Mapping[tuple[str, ...], float]


def _join(
    section: Section, rule: AgreementRule, predicted: LedgerColumn, counted: LedgerColumn
) -> Iterable[LedgerLine]:
    for key in dict.fromkeys((*predicted, *counted)):
        yield _line(section, rule, key, predicted.get(key, 0), counted.get(key, 0))


def _memory(predicted: Ledger, counted: Ledger) -> Iterable[LedgerLine]:
    def column(ledger: Ledger, components: Iterable[Component]) -> LedgerColumn:
        kept = frozenset(components)
        return {
            (row.component.value, row.module.value): row.bytes
            for row in ledger.memory
            if row.component in kept
        }

    for component in Component:
        rule = AgreementRule.EXACT if component in EXACT_COMPONENTS else AgreementRule.LISTED
        yield from _join(
            Section.MEMORY, rule, column(predicted, (component,)), column(counted, (component,))
        )
    saved = (
        sum(column(predicted, SAVED_COMPONENTS).values()),
        sum(column(counted, SAVED_COMPONENTS).values()),
    )
    if any(saved):
        yield _line(Section.MEMORY, AgreementRule.BOUND, ("saved activations", TOTAL), *saved)


def _in_flight(predicted: Ledger, counted: Ledger) -> Iterable[LedgerLine]:
    """Nothing for a ledger that does not hold the count, which is at least 1."""
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


def _flops(predicted: Ledger, counted: Ledger) -> Iterable[LedgerLine]:
    def column(ledger: Ledger) -> LedgerColumn:
        return {(row.op.value, row.module.value): row.flops for row in ledger.flops}

    def model_flops(ledger: Ledger) -> int:
        return sum(row.flops for row in ledger.flops if row.module is not Module.ROUTER)

    yield from _join(Section.FLOPS, AgreementRule.EXACT, column(predicted), column(counted))
    whole = (model_flops(predicted), model_flops(counted))
    if any(whole):
        yield _line(Section.FLOPS, AgreementRule.EXACT, ("model FLOPs", "all but router"), *whole)


def _time(predicted: Ledger, counted: Ledger) -> Iterable[LedgerLine]:
    def column(ledger: Ledger) -> LedgerColumn:
        return {(row.phase.value,): row.seconds for row in ledger.time}

    ours, theirs = column(predicted), column(counted)
    yield from _join(Section.TIME, AgreementRule.LISTED, ours, theirs)
    if ours or theirs:
        yield _line(
            Section.TIME, AgreementRule.LISTED, (TOTAL,), sum(ours.values()), sum(theirs.values())
        )
