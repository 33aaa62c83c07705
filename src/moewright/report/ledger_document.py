"""Counted ledgers beside predicted ones as documents: of a dry run, and of the ranks of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moewright.diagnosis.compare_ledgers import (
    AgreementRule,
    LedgerComparison,
    LedgerLine,
    LineStatus,
    Section,
)
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Line,
    Phrase,
    Table,
    TableRow,
    Tone,
    numbers,
    words,
)
from moewright.spec.ledger import Component, Ledger, Module, StorageMoment
from moewright.spec.units import format_bytes, plural

# The seconds of the counted step, on which every op was counted, are in none of them: they are not
# those of a step that trains.
_TITLES = {
    Section.MEMORY: "Memory held, bytes",
    Section.STORAGES: "All storages, whoever holds them, bytes",
    Section.COMM: "Collective payload, bytes a step",
    Section.CALLS: "Collective calls a step",
    Section.FLOPS: "FLOPs a step",
    Section.IN_FLIGHT: "Micro-batches' chunks alive at once",
}
_ROW_NAMES = {
    Section.MEMORY: "component / module",
    Section.STORAGES: "moment",
    Section.COMM: "operation / group",
    Section.CALLS: "operation / group",
    Section.FLOPS: "operation / module",
    Section.IN_FLIGHT: "chunk",
}
_STATUS_MARKS = {
    LineStatus.EQUAL: "equal",
    LineStatus.WITHIN: "within its bound",
    LineStatus.DIFFERS: "differs",
    LineStatus.ONLY_PREDICTED: "only predicted",
    LineStatus.ONLY_COUNTED: "only counted",
}
_AS_PREDICTED = (LineStatus.EQUAL, LineStatus.WITHIN)
# What a device holds besides tensors.
_DEVICE_COMPONENTS = (Component.COMMUNICATION, Component.FRAGMENTATION)
_LINES_SHOWN = 5
_PLACES_SHOWN = 3


def build_dry_run_document(
    comparison: LedgerComparison,
    *,
    subject: str,
    introduction: DocumentSection,
    states_bytes: int,
    tensor_bytes: Sequence[tuple[Module, int]],
    planned: Ledger | None,
) -> Document:
    """Build the lines of the comparison, and what fills the rank at its peak.

    A short answer shows the lines that differ, and counts the others. `states_bytes` are the
    counted bytes of model states and `tensor_bytes` those of the other tensors by the module that
    made them (see engine.run.dryrun). `planned` is the memory that the planner expects on the
    device, None where the device is not known.
    """
    lines = [_describe_peak(states_bytes, tensor_bytes)]
    if planned is not None:
        lines.append(_describe_planned(planned))
    return Document(
        subject=subject,
        heading="",
        sections=(
            introduction,
            *_list_sections(comparison),
            DocumentSection(lines=tuple(lines)),
            *_list_notes(comparison),
        ),
    )


def build_rank_section(comparison: LedgerComparison) -> DocumentSection:
    """Build the lines of one rank by section; a short answer has the promises kept."""
    promised = [line for line in comparison.lines if line.rule is not AgreementRule.LISTED]
    kept = sum(line.keeps_rule for line in promised)
    return DocumentSection(
        title=f"Rank {comparison.rank}",
        brief=f"{kept} of {len(promised)} promised lines hold",
        tone=Tone.judge(holds=kept == len(promised)),
        sections=(*_list_sections(comparison), *_list_notes(comparison)),
        extent=Extent.WHOLE,
    )


def describe_comparisons(comparisons: Sequence[LedgerComparison]) -> Iterator[str]:
    """Yield a line on the promised rows of all ranks, then one for each of some that fail.

    Of a moment at which more lives than the rows list, the largest places follow.
    """
    promised = [
        (comparison, line)
        for comparison in comparisons
        for line in comparison.lines
        if line.rule is not AgreementRule.LISTED
    ]
    failed = [(comparison, line) for comparison, line in promised if not line.keeps_rule]
    kept = len(promised) - len(failed)
    ranks = plural(len(comparisons), "rank")
    yield f"ledger: {kept} of {len(promised)} promised rows of {ranks} as predicted"
    for comparison, line in failed[:_LINES_SHOWN]:
        yield f"  rank {comparison.rank}: {_describe(line)}"
        if line.section is Section.STORAGES and line.counted > line.predicted:
            places = [row for row in comparison.unlisted if row.moment.value == line.key[-1]]
            for row in places[:_PLACES_SHOWN]:
                yield f"    no row lists {format_bytes(row.bytes)} of {row.module}: {row.place}"
    if len(failed) > _LINES_SHOWN:
        yield f"  and {plural(len(failed) - _LINES_SHOWN, 'row')} more"


def _describe(line: LedgerLine) -> str:
    text = f"{line.section}: {line.label}: {line.predicted:,.0f} predicted"
    if line.rule is AgreementRule.ALLOWANCE:
        text += f" and at most {line.allowance:,.0f} beside"
    return f"{text}, {line.counted:,.0f} counted"


def _list_sections(comparison: LedgerComparison) -> Iterator[DocumentSection]:
    """Yield a section of the comparison each, then the largest places of what no row lists."""
    for section, title in _TITLES.items():
        lines = comparison.lines_in(section)
        if lines:
            kept = sum(line.status in _AS_PREDICTED for line in lines)
            yield DocumentSection(
                title=title,
                brief=f"{title}: {kept} of {len(lines)} lines as predicted",
                table=_build_table(_ROW_NAMES[section], map(_build_row, lines)),
            )
    unlisted = tuple(_list_unlisted(comparison))
    if unlisted:
        yield DocumentSection(
            title="The largest that no row lists, by moment and place, bytes",
            table=_build_table("moment: place", unlisted),
            extent=Extent.LONG,
        )


def _build_table(row_name: str, rows: Iterable[TableRow]) -> Table:
    columns = (*words(row_name), *numbers("predicted", "counted", "difference"), *words(""))
    return Table(columns=columns, rows=tuple(rows))


def _build_row(line: LedgerLine) -> TableRow:
    is_listed = line.rule is AgreementRule.LISTED
    predicted = f"{line.predicted:,.0f}"
    counted = f"{line.counted:,.0f}"
    if line.status is LineStatus.ONLY_COUNTED:
        predicted = ""
    if line.status is LineStatus.ONLY_PREDICTED:
        counted = ""
    mark = _STATUS_MARKS[line.status]
    if is_listed:
        mark += ", listed only"
    tone = Tone.GOOD.where(not is_listed)
    if not line.keeps_rule:
        tone = Tone.BAD
    state = Phrase(text=mark, tone=tone, face=Face.BADGE)
    return TableRow(
        cells=(line.label, predicted, counted, _format_difference(line), state),
        extent=Extent.LONG if line.status in _AS_PREDICTED else Extent.SHORT,
    )


def _format_difference(line: LedgerLine) -> str:
    if line.status is LineStatus.EQUAL:
        return "0"
    difference = f"{line.difference:,.0f}"
    if line.relative_difference is None:
        return difference
    return f"{difference} ({line.relative_difference:+.2%})"


def _list_unlisted(comparison: LedgerComparison) -> Iterator[TableRow]:
    """Yield the largest places of what no row lists, of moments that break their rule or of all."""
    broken = {line.key[-1] for line in comparison.lines_in(Section.STORAGES) if not line.keeps_rule}
    tone = Tone.BAD.where(bool(broken))
    shown: dict[StorageMoment, int] = {}
    for row in comparison.unlisted:
        shown[row.moment] = shown.get(row.moment, 0) + 1
        if shown[row.moment] > _PLACES_SHOWN or (broken and row.moment.value not in broken):
            continue
        module = Phrase(text=row.module.replace("_", " "), tone=tone, face=Face.BADGE)
        yield TableRow(cells=(f"{row.moment}: {row.place}", "", f"{row.bytes:,}", "", module))


def _list_notes(comparison: LedgerComparison) -> Iterator[DocumentSection]:
    if comparison.notes:
        yield DocumentSection(
            title="What a CUDA device holds instead", items=ItemList(items=comparison.notes)
        )


def _describe_peak(states_bytes: int, tensor_bytes: Sequence[tuple[Module, int]]) -> Line:
    total = states_bytes + sum(size for _, size in tensor_bytes)
    tensors = ", ".join(
        f"{module.replace('_', ' ')} {format_bytes(size)}" for module, size in tensor_bytes if size
    )
    return (
        f"At its peak the rank holds {format_bytes(total)}, "
        f"of which states {format_bytes(states_bytes)}; the other tensors by module: {tensors}"
    )


def _describe_planned(planned: Ledger) -> Line:
    device_bytes = sum(row.bytes for row in planned.memory if row.component in _DEVICE_COMPONENTS)
    tensor_bytes = sum(row.bytes for row in planned.memory) - device_bytes
    return (
        f"The planner expects {format_bytes(tensor_bytes)} of tensors at that moment, with the "
        f"expert load of the job, and {format_bytes(device_bytes)} more for communicators, "
        "context and fragmentation"
    )
