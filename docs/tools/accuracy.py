"""Write docs/accuracy.md, its picture and the pages beside it: every published run as predicted.

The page has what a stranger meets; docs/accuracy_own_runs.md, _blind.md and _unexplained.md have
an idea each, docs/accuracy/ the runs of each publisher.

`make accuracy` runs it. Each run is predicted by constants fitted without its publisher. JSON
reports of `moewright validate ... --leave-out publisher`, without `--own-rows 3`, with it, with
`--own-columns model,hardware` too, and one of `--leave-out framework,hardware`, may be given
instead of computing them anew. The runs that no constant was fitted to are always predicted anew,
as shipped, which takes seconds.
"""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import log10
from pathlib import Path
from typing import Any

from numpy import median, quantile

from moewright.calibration.table import read_table
from moewright.view.page import TIME_COLOURS

PAGE = Path(__file__).parents[1] / "accuracy.md"
PICTURE = PAGE.with_suffix(".svg")
RUNS = PAGE.with_suffix("")  # a folder with a page a publisher
OWN_RUNS_PAGE = PAGE.with_name("accuracy_own_runs.md")
BLIND_PAGE = PAGE.with_name("accuracy_blind.md")
UNEXPLAINED_PAGE = PAGE.with_name("accuracy_unexplained.md")
TABLES = tuple(
    Path(__file__).parents[2] / "tests" / "published" / "data" / name
    for name in ("measurements.csv", "measurements_more.csv")
)
_BLIND_TABLE = TABLES[0].with_name("blind_runs.csv")
_REMARKS = Path(__file__).parent / "accuracy_remarks.toml"
_UNEXPLAINED = 0.3  # an error from which a row is listed as not explained
_SIZE = 640  # of the picture, in its own units
_MARGIN = 48
_INTRODUCTION = """# Accuracy

Every published run that the planner can read, predicted by constants that were fitted **without
its publisher**: in each fold every fitted constant is fitted again from its prior, so that no row
of a publisher moves the constants that predict it. The form of the model, the centres of the priors
and the habits of software by which unstated switches are read were chosen with these rows in view.
`make accuracy` writes this page; the same figures come from

    moewright validate tests/published/data/measurements.csv \\
        tests/published/data/measurements_more.csv --leave-out publisher

An error is |predicted / measured - 1| of tokens/s a device. *Complete* rows state all that decides
their speed; of *switches unstated* the likely readings are priced and their median is taken; under
*natural routing* the router decided where tokens went. *In 80 %* and *in 95 %* are the shares of
measurements inside their own intervals, whose widths come from residuals of other publishers.
Rank correlation and regret are means over groups of one model on one device with three layouts or
more. Nothing here was measured by us on a GPU.

Pages of their own have [three runs of one's own](accuracy_own_runs.md), runs that
[nothing was fitted to](accuracy_blind.md), rows that are
[not explained](accuracy_unexplained.md) and [other planners](rivals.md).
"""

_STACK_TEXT = """The folds leave out each pair of a framework and a part: what a stranger meets
whose stack nobody fitted (`--leave-out framework,hardware`).
"""
_PICK_TEXT = """A search takes the layout that is predicted fastest, and so one whose speed is
rather overrated. The tables replayed as choices, publishers left out: of {jobs} jobs with five
measured layouts or more, the layout predicted fastest lost {regret} of the best measured speed in
the mean ({bound_regret} by the bound that plans are ranked by), and was {error} off. Below are all
jobs with two measured layouts or more, predicted over measured speed: of the pick, of all layouts
of its job, of the one over the other, which is the bias of picking, and what a plan is told to
expect beyond its prediction (`expected` beside each plan).
"""
_OWN_ROWS = 3
_OWN_COLUMNS = ("model", "hardware")
_OWN_ALIKE_TEXT = """As a user's own first runs would be: of each model on each part of a publisher,
three rows, those whose choices tell most of the others, are fitted and not scored; the publisher's
other models and parts are left out (`--own-rows 3 --own-columns model,hardware`). What the fit
leaves open of the three is carried over to runs alike, as by `moewright fit`.
"""
_OWN_ROWS_TEXT = """Three rows of all that the publisher ran, whatever model and part, those whose
choices tell most of the others (`--own-rows 3`).
"""
_OWN_RUNS_INTRODUCTION = """# Accuracy after runs of one's own

The columns are those of [accuracy](accuracy.md).
"""
_BLIND_TEXT = """# Accuracy on runs that nothing was fitted to

The columns are those of [accuracy](accuracy.md). Runs of sources that no other table has
(`tests/published/data/blind_runs.csv`), predicted by the constants as shipped, which are not fitted
to them. What a stranger meets is **how they were first predicted**, before anything was changed for
them. Today's figures are of the same rows, with those that could not be read at first, after what
they led to; what was mended stands in [the log](log/planner_accuracy.md).
"""
_FIRST_SCORES = Path(__file__).parent / "accuracy_first_scores.toml"
_BARS = "\n<!-- bars: median by split in rows -->"
_STATEMENTS = ("complete", "switches unstated", "natural routing")

Row = Mapping[str, Any]


def render_page(report: Mapping[str, Any], stack_report: Mapping[str, Any] | None = None) -> str:
    """Return the text of the page for reports of validate.

    `stack_report` is the one that leaves out pairs of framework and part.
    """
    timed = [row for row in report["rows"] if _error(row) is not None]
    parts = [
        _INTRODUCTION,
        "![Predicted and measured tokens/s a device](accuracy.svg)\n",
        "## Summary\n",
        "\n".join(_summary_lines(report["summary"])),
        *_summary_parts(
            stack_report, "Where neither the framework nor the part was fitted", _STACK_TEXT
        ),
        *_pick_parts(report["summary"]["choices"]),
        "\n## Peaks\n",
        _peak_text(report["summary"]["memory"]),
        "\n## Every run\n",
        "One page a publisher.\n",
        "\n".join(_publisher_lines(timed)) + "\n",
    ]
    return "\n".join(parts)


def render_own_runs(own_report: Mapping[str, Any], alike_report: Mapping[str, Any]) -> str:
    """Return the text of the page of fits that have some rows of the publisher itself.

    Those of `alike_report` are of the same model and part.
    """
    alike = f"With {_OWN_ROWS} own runs of the same model and part"
    own = f"With {_OWN_ROWS} of a publisher's own rows"
    parts = [
        _OWN_RUNS_INTRODUCTION.rstrip("\n"),
        *_summary_parts(alike_report, alike, _OWN_ALIKE_TEXT),
        *_summary_parts(own_report, own, _OWN_ROWS_TEXT),
    ]
    return "\n".join(parts) + "\n"


def render_blind(report: Mapping[str, Any], with_experts: Collection[str]) -> str:
    """Return the text of the page of runs that no constant was fitted to.

    `with_experts` are the ids of the rows whose models have experts.
    """
    firsts = "\n".join(_first_score_lines(report["rows"], with_experts))
    lines = "\n".join(_summary_lines(report["summary"]))
    peaks = _peak_text(report["summary"]["memory"])
    return f"{_BLIND_TEXT}\n{firsts}\n\n## Today\n\n{lines}\n{_BARS}\n\n{peaks}\n"


def _first_score_lines(rows: Sequence[Row], with_experts: Collection[str]) -> Iterator[str]:
    """Yield the lines of the collections of rows: as they were first predicted, and today."""
    collections = tomllib.loads(_FIRST_SCORES.read_text(encoding="utf-8"))["collection"]
    yield "| rows | collection | first count | median | p90 | count today | median | p90 | remark |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|"
    for number, entry in enumerate(collections):
        kind = entry["kind"]
        named = [tuple(other["rows"]) for other in collections if other["kind"] == kind]
        named_rows = tuple(start for starts in named for start in starts)
        errors = [
            abs(error)
            for row in rows
            if (error := _error(row)) is not None
            and (row["id"] in with_experts) == (kind == "moe")
            and _belongs(row["id"], tuple(collections[number]["rows"]), named_rows)
        ]
        count, median_error, p90_error = entry["first"]
        today = ("", "")
        if errors:
            today = (_percent(float(median(errors))), _percent(float(quantile(errors, 0.9))))
        cells = [
            kind,
            entry["title"],
            str(count),
            _percent(median_error),
            _percent(p90_error),
            str(len(errors)),
            *today,
            entry.get("remark", ""),
        ]
        yield f"| {' | '.join(cells)} |"


def _belongs(row_id: str, starts: tuple[str, ...], all_starts: tuple[str, ...]) -> bool:
    """Return whether a row is of the collection of these starts; without any, of no other."""
    return row_id.startswith(starts) if starts else not row_id.startswith(all_starts)


def render_unexplained(report: Mapping[str, Any]) -> str:
    """Return the text of the page of rows that are far off, with what is suspected."""
    timed = [row for row in report["rows"] if _error(row) is not None]
    lines = "\n".join(_unexplained_lines(timed))
    return f"# Published runs that are not explained\n\n{lines}\n"


def render_runs(
    report: Mapping[str, Any], cells: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the text of the page of each publisher, by publisher, with all its timed runs."""
    pages = {}
    for publisher, rows in _group_by_publisher(report["rows"]).items():
        lines = "\n".join(_row_lines(rows, cells))
        pages[publisher] = (
            f"# Accuracy: runs of {publisher}\n\n"
            f"The columns are those of [accuracy](../accuracy.md).\n\n{lines}\n"
        )
    return pages


def _group_by_publisher(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the timed rows of each publisher, publishers in alphabetical order."""
    timed = [row for row in rows if _error(row) is not None]
    names = sorted({row["publisher"] for row in timed})
    return {name: [row for row in timed if row["publisher"] == name] for name in names}


def _publisher_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "| publisher | runs |"
    yield "|---|---:|"
    for publisher, own in _group_by_publisher(rows).items():
        yield f"| [{publisher}](accuracy/{publisher}.md) | {len(own)} |"


def _summary_parts(report: Mapping[str, Any] | None, title: str, text: str) -> Iterator[str]:
    if report:
        yield f"\n## {title}\n"
        yield text
        yield "\n".join(_summary_lines(report["summary"], names=("all", *_STATEMENTS)))
        yield _BARS


def _summary_lines(summary: Mapping[str, Any], names: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of the splits of these names, of all where there are none."""
    yield "| rows | split | count | median | p90 | bias | in 80 % | in 95 % | rank corr. | regret |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for split in summary["splits"]:
        if names and split["name"] not in names:
            continue
        speeds = split["speeds"]
        correlation = split["rank_correlation"]
        cells = [
            split["by"],
            split["name"],
            str(speeds["rows"]),
            _percent(speeds["median_error"]),
            _percent(speeds["p90_error"]),
            f"{100 * speeds['bias']:+.1f} %",
            _percent(split["coverage_80"]),
            _percent(split["coverage_95"]),
            "" if correlation is None else f"{correlation:.2f}",
            _percent(split["regret"]),
        ]
        yield f"| {' | '.join(cells)} |"


def _pick_parts(choices: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what taking the layouts that are predicted best would have cost, and promised."""
    if choices is None:
        return
    yield "\n## The pick\n"
    yield _PICK_TEXT.format(
        jobs=len(choices["jobs"]),
        regret=_percent(choices["regret_by_prediction"]),
        error=_percent(choices["error_by_prediction"]),
        bound_regret=_percent(choices["regret_by_bound"]),
    )
    yield "| jobs | count | pick | all its layouts | pick beyond them | expected beyond |"
    yield "|---|---:|---:|---:|---:|---:|"
    for bias in choices["biases"]:
        beyond = (1 + bias["error"]) / (1 + bias["job_error"]) - 1
        shares = (bias["error"], bias["job_error"], beyond, bias["expected"])
        cells = [bias["name"], str(bias["jobs"]), *(f"{100 * share:+.1f} %" for share in shares)]
        yield f"| {' | '.join(cells)} |"


def _peak_text(memory: Mapping[str, Any]) -> str:
    return (
        f"{memory['peaks']} measured peaks: median error {_percent(memory['median_error'])}, 90th"
        f" percentile {_percent(memory['p90_error'])}; {_percent(memory['coverage_80'])} lie in"
        f" their 80 % interval and {_percent(memory['coverage_95'])} in their 95 % interval. Of"
        f" {memory['ran']} runs that ran, {memory['ran_fits']} are said to fit and"
        f" {memory['ran_uncertain']} are uncertain."
    )


def _unexplained_lines(rows: Sequence[Row]) -> Iterator[str]:
    remarks = tomllib.loads(_REMARKS.read_text(encoding="utf-8"))["remark"]
    yield f"Rows that are more than {_UNEXPLAINED:.0%} off, with what is suspected.\n"
    yield "| row | measured | predicted | error | suspected |"
    yield "|---|---:|---:|---:|---|"
    for row in sorted(rows, key=lambda row: -abs(_error(row) or 0.0)):
        error = _error(row) or 0.0
        if abs(error) > _UNEXPLAINED:
            why = next((entry["text"] for entry in remarks if row["id"] in entry["rows"]), "")
            measured, predicted = _speeds(row)
            yield f"| {row['id']} | {measured} | {predicted} | {100 * error:+.0f} % | {why} |"


def _row_lines(rows: Sequence[Row], cells: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    yield "| row | model | devices | precision | measured | predicted | 80 % interval | error |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    for row in rows:
        job = cells.get(row["id"], {})
        measured, predicted = _speeds(row)
        low, high = row["interval_80"]
        facts = [
            row["id"],
            job.get("model", "").rpartition("/")[2],
            f"{job.get('num_gpus', '')} {job.get('hardware', '')}",
            job.get("precision", ""),
            measured,
            predicted,
            f"{low:,.0f}-{high:,.0f}",
            f"{100 * (_error(row) or 0.0):+.1f} %",
        ]
        yield f"| {' | '.join(facts)} |"


def render_picture(report: Mapping[str, Any]) -> str:
    """Return a picture of predicted over measured speeds, logarithmic, a colour a publisher."""
    timed = [row for row in report["rows"] if _error(row) is not None]
    speeds = [
        row[name]
        for row in timed
        for name in ("measured_tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu")
    ]
    low = log10(min(speeds)) - 0.1
    scale = (_SIZE - 2 * _MARGIN) / (log10(max(speeds)) + 0.1 - low)

    def place(value: float) -> float:
        return _MARGIN + scale * (log10(value) - low)

    publishers = sorted({row["publisher"] for row in timed})
    palette = tuple(TIME_COLOURS.values())
    colour = {name: palette[index % len(palette)] for index, name in enumerate(publishers)}
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE + 130} {_SIZE}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    ends = min(speeds), max(speeds)
    for ratio, dash in ((1.0, ""), (1.25, "4 4"), (0.8, "4 4")):
        first, last = (f"{place(x):.1f} {_SIZE - place(ratio * x):.1f}" for x in ends)
        shapes.append(
            f'<path d="M{first}L{last}" stroke="#999" stroke-dasharray="{dash}" fill="none"/>'
        )
    for power in range(int(low) - 1, 7):
        if low <= power <= log10(max(speeds)) + 0.1:
            at = place(10**power)
            label = f"{10**power:,}"
            shapes.append(
                f'<text x="{at:.1f}" y="{_SIZE - 20}" text-anchor="middle">{label}</text>'
            )
            shapes.append(
                f'<text x="{_MARGIN - 6}" y="{_SIZE - at:.1f}" text-anchor="end">{label}</text>'
            )
    for row in timed:
        x = place(row["measured_tokens_per_s_per_gpu"])
        y = _SIZE - place(row["predicted_tokens_per_s_per_gpu"])
        fill = colour[row["publisher"]]
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" fill-opacity="0.7"/>')
    for index, name in enumerate(publishers):
        y = 20 + 16 * index
        shapes.append(f'<circle cx="{_SIZE + 6}" cy="{y - 4}" r="4" fill="{colour[name]}"/>')
        shapes.append(f'<text x="{_SIZE + 16}" y="{y}">{name}</text>')
    middle = _SIZE / 2
    shapes.append(
        f'<text x="{middle}" y="{_SIZE - 4}" text-anchor="middle">measured tokens/s a device</text>'
    )
    shapes.append(
        f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" text-anchor="middle">'
        "predicted</text>"
    )
    return "\n".join([*shapes, "</svg>\n"])


def _error(row: Row) -> float | None:
    measured = row["measured_tokens_per_s_per_gpu"]
    predicted = row["predicted_tokens_per_s_per_gpu"]
    return predicted / measured - 1 if measured and predicted else None


def _speeds(row: Row) -> tuple[str, str]:
    return (
        f"{row['measured_tokens_per_s_per_gpu']:,.0f}",
        f"{row['predicted_tokens_per_s_per_gpu']:,.0f}",
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _read_cells() -> dict[str, dict[str, str]]:
    cells: dict[str, dict[str, str]] = {}
    for path in TABLES:
        with path.open(encoding="utf-8", newline="") as file:
            cells |= {row["id"]: row for row in csv.DictReader(file)}
    return cells


def _compute_report(
    leave_out: Sequence[str], own_rows: int, own_columns: Sequence[str]
) -> dict[str, Any]:
    from moewright.api.measuring import validate

    score = validate(*TABLES, leave_out=leave_out, own_rows=own_rows, own_columns=own_columns)
    return asdict(score)


def _score_blind() -> dict[str, Any]:
    from moewright.api.measuring import validate

    return asdict(validate(_BLIND_TABLE))


def _list_with_experts() -> set[str]:
    """Return the ids of the blind rows whose models have experts."""
    return {row.id for row in read_table(_BLIND_TABLE).rows if row.model.moe is not None}


def main(arguments: Sequence[str]) -> None:
    """Write the pages and the picture, from four reports of validate where they are given."""
    if arguments:
        reports = [json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments]
    else:
        whole = ("publisher",)
        asked: tuple[tuple[Sequence[str], int, Sequence[str]], ...] = (
            (whole, 0, ()),
            (whole, _OWN_ROWS, ()),
            (whole, _OWN_ROWS, _OWN_COLUMNS),
            (("framework", "hardware"), 0, ()),
        )
        reports = [_compute_report(*report) for report in asked]
    whole_report, own_report, alike_report, stack_report = reports
    PAGE.write_text(render_page(whole_report, stack_report), encoding="utf-8")
    OWN_RUNS_PAGE.write_text(render_own_runs(own_report, alike_report), encoding="utf-8")
    BLIND_PAGE.write_text(render_blind(_score_blind(), _list_with_experts()), encoding="utf-8")
    UNEXPLAINED_PAGE.write_text(render_unexplained(whole_report), encoding="utf-8")
    RUNS.mkdir(exist_ok=True)
    for publisher, text in render_runs(whole_report, _read_cells()).items():
        (RUNS / f"{publisher}.md").write_text(text, encoding="utf-8")
    PICTURE.write_text(render_picture(whole_report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
