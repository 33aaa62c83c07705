"""A check of a change as a document, and as SARIF 2.1.0 and the XML of JUnit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from moewright.diagnosis.checks import Check, JobCheck, OptionChange, format_growth, format_measure
from moewright.diagnosis.compare_ledgers import Section
from moewright.diagnosis.plan_changes import Measure, MeasureChange, PlanChanges, RowChange
from moewright.report.document import (
    Document,
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Line,
    Phrase,
    Tone,
    build_table,
    numbers,
    words,
)
from moewright.spec.errors import escape_controls
from moewright.spec.quoting import Json
from moewright.spec.units import format_bytes, format_count, format_given
from moewright.version import __version__

_MAX_SWITCHES = 12  # in a comment of a pull request; the rest under -v
_MAX_ROWS = 8  # as for switches
_MOST_LETTERS = 120  # of a value, a line of a comment: what differs is listed by its options
_NAMES = {
    Measure.STEP: "step",
    Measure.PEAK: "peak of the fullest rank",
    Measure.STATES: "weights, gradients, optimizer",
    Measure.SAVED: "saved activations",
    Measure.HOST: "host memory",
    Measure.COMM: "sent a step",
    Measure.CALLS: "calls a step",
    Measure.FLOPS: "FLOPs a step",
    Measure.ALL_FLOPS: "FLOPs a step, all ranks",
    Measure.GRAPH_BREAKS: "graph breaks a step",
}


def build_check_document(check: Check) -> Document:
    """Build the verdict, and a section for each job."""
    tone = Tone.BAD
    if check.keeps_budgets and check.keeps_fit:
        # A change that keeps its budgets is no good news by that.
        tone = Tone.GOOD.where(check.is_neutral)
    return Document(
        subject=f"{check.before} -> {check.after}",
        heading=check.title(),
        sections=tuple(
            _build_job_section(job, tone, is_alone=len(check.jobs) == 1) for job in check.jobs
        ),
        hint="" if check.is_neutral else "all rows of the ledger, and notes: -v",
    )


def _build_job_section(job: JobCheck, tone: Tone, *, is_alone: bool) -> DocumentSection:
    title = Phrase(text=job.path, tone=tone, face=Face.CODE)
    changes = job.changes
    if changes is None:
        return DocumentSection(title=title, lines=(f"{job.note}: nothing is compared",))
    if changes.is_neutral:
        lines = ("nothing that is planned changes",) if not is_alone else ()
        return DocumentSection(title=title, lines=lines, sections=tuple(_list_options(job)))
    breaches = tuple(
        (Phrase(text="over budget: ", tone=Tone.BAD, face=Face.STRONG), breach.text)
        for breach in job.breaches
    )
    if changes.breaks_fit:
        breaches += (
            (
                Phrase(text="does not fit any more: ", tone=Tone.BAD, face=Face.STRONG),
                f"the verdict was {changes.verdict_before}",
            ),
        )
    return DocumentSection(
        title=title,
        lines=(*breaches, *_list_summary(changes)),
        items=ItemList(items=tuple(map(str, changes.switches)), short=_MAX_SWITCHES),
        sections=(*_list_tables(changes), *_list_options(job)),
    )


def _list_summary(changes: PlanChanges) -> Iterator[Line]:
    if changes.layout_before != changes.layout_after:
        yield (
            Phrase(text=changes.layout_before, face=Face.CODE),
            " -> ",
            Phrase(text=changes.layout_after, face=Face.CODE),
        )
    if changes.step_ratio:
        low, high = changes.step_ratio_80
        spread = f" ({low:.3f} to {high:.3f} in 8 of 10 cases)" if low < high else ""
        yield f"predicted step: {changes.step_ratio:.4f} of what it was{spread}"
    if changes.graph_obstacles_before != changes.graph_obstacles_after:
        before, after = (
            ", ".join(fields) or "nothing"
            for fields in (changes.graph_obstacles_before, changes.graph_obstacles_after)
        )
        yield f"keeps a step from being one graph (graphs=full): {before} -> {after}"
    yield (
        f"verdict: {changes.verdict_before} ({changes.fit_probability_before:.0%} likely to fit) "
        f"-> {changes.verdict_after} ({changes.fit_probability_after:.0%})"
    )


def _list_tables(changes: PlanChanges) -> Iterator[DocumentSection]:
    yield DocumentSection(
        table=build_table(
            (*words("of the rank with most"), *numbers("before", "after", "change", "exactly")),
            map(_list_measure_cells, changes.measures),
        )
    )
    fullest = [row for row in changes.rows if row.pp_rank == changes.fullest]
    others = [row for row in changes.rows if row.pp_rank != changes.fullest]
    if fullest:
        yield DocumentSection(
            title=f"Rows of pipeline rank {changes.fullest}, the fullest",
            table=build_table(_ROW_COLUMNS, map(_list_row_cells, _sort(fullest)), short=_MAX_ROWS),
        )
    if others:
        yield DocumentSection(
            title="Rows of the other pipeline ranks",
            table=build_table(
                (*numbers("rank"), *_ROW_COLUMNS),
                ((str(row.pp_rank), *_list_row_cells(row)) for row in others),
            ),
            extent=Extent.WHOLE,
        )


_ROW_COLUMNS = (*words("section", "row"), *numbers("before", "after", "change"))


def _sort(rows: list[RowChange]) -> list[RowChange]:
    """Return rows by section, the largest change of each first."""
    order = list(Section)
    return sorted(rows, key=lambda row: (order.index(row.section), -abs(row.after - row.before)))


def _list_measure_cells(change: MeasureChange) -> Iterator[Line]:
    measure = change.measure
    yield _NAMES[measure]
    yield format_measure(measure, change.before)
    after = format_measure(measure, change.after)
    low, high = change.interval_80
    if measure.is_predicted and high > low:
        ends = (format_measure(measure, end) for end in (low, high))
        after = f"{after} ({' to '.join(ends)})"
    yield after
    yield format_growth(change) if change.growth else "same"
    if measure.is_predicted:
        yield "predicted"
    else:
        yield f"{change.after - change.before:+,.0f}" if change.growth else "0"


def _list_row_cells(row: RowChange) -> Iterator[Line]:
    shown = {Section.CALLS: lambda value: f"{value:,.0f}", Section.FLOPS: format_count}.get(
        row.section, format_bytes
    )
    yield row.section.value
    yield row.label
    yield format_given(row.before, shown, "-")
    yield format_given(row.after, shown, "-")
    yield f"{row.after - row.before:+,.0f}"


def _list_options(job: JobCheck) -> Iterator[DocumentSection]:
    if job.options:
        yield DocumentSection(
            title="As written",
            items=ItemList(items=tuple(map(_format_option, job.options)), short=_MAX_SWITCHES),
        )
    if job.notes:
        yield DocumentSection(title="New notes", notes=job.notes, extent=Extent.LONG)


def _format_option(option: OptionChange) -> Line:
    name = Phrase(text=option.name, face=Face.CODE)
    before, after = (_cut(text) for text in (option.before, option.after))
    if not before:
        return (name, f" {after}" if after != "on" else "", ", which was not there")
    if not after:
        return (name, f" {before}" if before != "on" else "", ", left out now")
    return (name, f" {before} -> {after}")


def _cut(text: str) -> str:
    """Return the beginning of a value; a variable may hold a whole command."""
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_FIT = "fits"
_HELP = {_FIT: "the job fits, or may fit, as it did before the change"}


def render_sarif(check: Check) -> Json:
    """Return a log of SARIF 2.1.0 with a result for each broken budget."""
    results = [
        _build_result(job, rule, text) for job in check.jobs for rule, text in list_failures(job)
    ]
    rules = sorted({result["ruleId"] for result in results})
    driver = {
        "name": "moewright check",
        "version": __version__,
        "rules": [
            {"id": rule, "shortDescription": {"text": _HELP.get(rule, f"budget {rule}")}}
            for rule in rules
        ],
    }
    run = {"tool": {"driver": driver}, "results": results}
    return Json.dump({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def list_failures(job: JobCheck) -> Iterator[tuple[str, str]]:
    """Yield the rule and a sentence for each reason for which a job fails."""
    yield from ((breach.budget, breach.text) for breach in job.breaches)
    if job.changes is not None and job.changes.breaks_fit:
        yield _FIT, f"does not fit any more: the verdict was {job.changes.verdict_before}"


def _build_result(job: JobCheck, rule: str, text: str) -> dict[str, Any]:
    place = {
        "artifactLocation": {"uri": quote(job.path)},  # a URI reference: no spaces, no fragments
        "region": {"startLine": job.line},
    }
    return {
        "ruleId": rule,
        "level": "error",
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def render_junit(check: Check, moment: datetime) -> str:
    """Return a test suite of JUnit with a case for each job, which fails over its budgets.

    It is valid by the schemas of Apache Ant's and of Jenkins' reports, which ask for a time and a
    host: `moment` in UTC is when the check was made.
    """
    failed = [job for job in check.jobs if any(list_failures(job))]
    skipped = [job for job in check.jobs if job.note and job not in failed]
    suite = ElementTree.Element(
        "testsuite",
        name="moewright check",
        timestamp=moment.strftime("%Y-%m-%dT%H:%M:%S"),
        hostname="localhost",
        tests=str(len(check.jobs)),
        failures=str(len(failed)),
        errors="0",
        skipped=str(len(skipped)),
        time="0",
    )
    ElementTree.SubElement(suite, "properties")
    for job in check.jobs:
        name = escape_controls(job.path)
        case = ElementTree.SubElement(
            suite, "testcase", classname="moewright.check", name=name, time="0"
        )
        texts = [escape_controls(text) for _, text in list_failures(job)]
        if texts:
            failure = ElementTree.SubElement(case, "failure", message=texts[0], type="budget")
            failure.text = "; ".join(texts)
        elif job.note:
            ElementTree.SubElement(case, "skipped", message=escape_controls(job.note))
    ElementTree.SubElement(suite, "system-out")
    ElementTree.SubElement(suite, "system-err")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
