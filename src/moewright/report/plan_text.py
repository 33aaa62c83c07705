"""The answer of `plan` on a terminal: the ranking, why its first is first, and what may not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.codec import format_layout, format_layout_changes
from moewright.codec.layout_words import describe_layout, summarize_changes
from moewright.cost.evidence import JOIN, OWN_RATES
from moewright.diagnosis.judgement import describe_nearest_run
from moewright.diagnosis.published import find_nearest_runs
from moewright.report.console import make_table, spell
from moewright.report.document import (
    DocumentSection,
    Extent,
    Phrase,
    build_table,
    draw_bar,
    numbers,
    words,
)
from moewright.report.document_text import draw_phrase, print_sections
from moewright.report.estimate_document import VERDICT_TONES, build_assumptions, job_title
from moewright.report.rank_grid import build_rank_grid, draw_ranks
from moewright.search.explain import DEPARTURE, EXPECTED_ERROR, SECOND, UNUSED
from moewright.search.misfit import REMEDY
from moewright.spec.layout import Layout
from moewright.spec.plan import (
    Estimate,
    Evidence,
    EvidenceGrade,
    JobChoice,
    Plan,
    RankingRule,
    Recommendation,
)
from moewright.spec.units import format_bytes, format_figures, format_seconds, plural

_RANKING_COLUMNS = (
    "",
    "layout",
    "step",
    "tok/s/dev",
    "TFLOP/s/dev",
    "MFU",
    "peak of capacity",
    "margin",
    "verdict",
)
_CHOICE_COLUMNS = ("precision", "global batch", "step", "tok/s/dev", "published runs", "layout")
_DETAILS = (
    DEPARTURE,
    REMEDY,
    SECOND,
    UNUSED,
    EXPECTED_ERROR,
    "Evidence",
)  # sentences begin with them
_BAR_WIDTH = 10
_NAMES_SHOWN = 2  # of choices without evidence
_INDENT = "    "  # of a layout under its figures
_SPELLED_PLANS = 3  # that a short answer has in words and as text, four lines each
_WIDEST_LAYOUT = 40  # characters of a layout that a column of the table holds
_GRADES = {
    EvidenceGrade.MEASURED: "published runs made all choices of this plan together",
    EvidenceGrade.COMBINED: "published runs made each pair of its choices, none made all of them",
    EvidenceGrade.STACKED: "published runs made each of its choices, but not every pair together",
    EvidenceGrade.FORMULA: "no published run made some of its choices",
}


def print_plans(
    console: Console,
    plans: Sequence[Plan],
    *,
    own: Plan | None = None,
    gambles: Sequence[Plan] = (),
    rejected: Sequence[tuple[str, int]] = (),
    why: Sequence[str] = (),
    verbose: bool = False,
) -> None:
    """Print plans of one job, best first, and what was assumed for them.

    The first is marked. `own` is the best plan that keeps the keys of a job file, `gambles` are
    faster plans that may not fit, `why` says in lines why the first wins, and `rejected` counts the
    layouts that each rule rejected. Only `verbose` lists departures from guidelines, what sets the
    second plan apart, evidence and expected errors, more than one gamble, every constant and rule.
    """
    if not plans:
        console.print(Text("No legal layout fits.", style="red"))
        print_sections(console, _rejections(rejected), verbose=True)
        return
    # FLOPs are the last part of a title, which -v alone has.
    title, _, flops = job_title(plans[0]).rpartition(", ")
    console.print(Text(f"{title}, {flops}" if verbose else title, style="bold"))
    console.print(Text(f"First: {_say_layout(plans[0].layout)}."))
    _print_ranks(console, plans[0], plans[0].layout)
    if verbose:
        console.print(_ranking_table(console, plans, plans[:1]))
    else:
        print_ranking(console, plans, picked=plans[:1])
    if not verbose:
        step_s = plans[0].estimate.step_s
        # Those that are faster by the bound alone are left to -v.
        gambles = [plan for plan in gambles if plan.estimate.step_s < step_s][:1]
    extra_lines = _extra_lines(plans, own, gambles)
    if any(later.estimate.step_s < plan.estimate.step_s for plan, later in pairwise(plans)):
        console.print(Text(_describe_order(plans[0].rule)))
    _print_recommendations(console, plans[0])
    for line in (*why, *extra_lines):
        if verbose or not line.startswith(_DETAILS):
            console.print(Text(line))
    if verbose:
        console.print()
    sections = (build_assumptions(plans[0].estimate.assumptions), *_rejections(rejected))
    print_sections(console, sections, verbose=verbose)


def _describe_order(rule: RankingRule) -> str:
    """Say by what plans are ranked that are not in the order of their steps."""
    return (
        f"Ranked by the time exceeded in {rule.risk:.0%} of cases (--risk), not by the predicted "
        "time."
    )


def print_ranking(console: Console, plans: Sequence[Plan], *, picked: Sequence[Plan]) -> None:
    """Print plans of one job alone, the picked ones marked.

    Layouts that no column holds stand below their figures, whole.
    """
    if max(len(format_layout(plan.layout)) for plan in plans) <= _WIDEST_LAYOUT:
        console.print(_ranking_table(console, plans, picked))
        return
    for text in _ranking_lines(plans, picked, console.width):
        console.print(text)


def print_choices(console: Console, choices: Sequence[JobChoice]) -> None:
    """Print the best layout of each job that a plan chose among."""
    if len(choices) < 2:
        return
    table = make_table(*_CHOICE_COLUMNS, text_columns=("precision", "layout"))
    for choice in choices:
        figures = ("", "")
        text = choice.refusal
        if choice.layout is not None:
            text = format_layout(choice.layout).replace(",", ", ")
            speed = format_figures(choice.tokens_per_s_per_device)
            figures = (format_seconds(choice.step_s), speed)
        mark = "> " if choice.is_chosen else ""
        job = " + ".join((choice.precision.value, *choice.switches))
        names = (f"{mark}{job}", f"{choice.global_batch:,}")
        table.add_row(*names, *figures, str(choice.runs), Text(text))
    console.print(table)


def _extra_lines(plans: Sequence[Plan], own: Plan | None, gambles: Sequence[Plan]) -> Iterable[str]:
    """Yield lines on what the first plan rests on, what is faster, and the job's own layout."""
    first = plans[0]
    yield f"Evidence: {describe_evidence(first.estimate.evidence)}."
    # Else the nearest run stands beside what to expect.
    if first.fast is None or first.fast.published is None:
        yield from map(describe_nearest_run, find_nearest_runs(first, 1))
    texts = []
    uneven = first.estimate.imbalance
    if uneven.even_step_s:
        slow_s = format_seconds(uneven.step_p90_s)
        texts.append(f"imbalance costs {uneven.cost:.1%}, 1 run of 10 over {slow_s}")
    if first.estimate.load_limit > 1:
        texts.append(f"memory full at {first.estimate.load_limit:.2f} x")
    if texts:
        yield f"Routing: {'; '.join(texts)}."
    wanted = first.rule.fit_probability
    if first.estimate.fit_probability < wanted:
        yield (
            f"Gamble: no layout fits with a probability of {wanted:.0%}; this one, the likeliest, "
            f"fits with {first.estimate.fit_probability:.0%}."
        )
    for plan in gambles:
        estimate = plan.estimate
        change = estimate.step_s / first.estimate.step_s - 1
        yield (
            f"Gamble: {format_seconds(estimate.step_s)} a step, {change:+.1%}, "
            f"{format_layout_changes(plan.layout, first.layout)}; it fits with a probability of "
            f"{estimate.fit_probability:.0%}."
        )
    if own is not None and own.layout != first.layout:
        estimate = own.estimate
        change = estimate.step_s / first.estimate.step_s - 1
        yield (
            f"The job's own layout keys give {format_layout(own.layout)}: "
            f"{format_seconds(estimate.step_s)} a step, {change:+.1%}; --layout pins keys."
        )


def _say_layout(layout: Layout) -> str:
    """Return a layout in words, as they go on in a sentence."""
    words = describe_layout(layout).sentence
    return f"{words[0].lower()}{words[1:]}"


def _print_ranks(console: Console, plan: Plan, layout: Layout) -> None:
    """Print the ranks of a layout on the hardware of a plan, where there are several."""
    if layout.world_size > 1:
        grid = build_rank_grid(layout, plan.hardware.fabric.devices_per_node)
        console.print(Text(f"{_INDENT}{spell(console, draw_ranks(grid))}"))


def _print_recommendations(console: Console, plan: Plan) -> None:
    """Print what to expect of the first plan of a search, and of the layout that somebody ran.

    That one is printed as labels, as ranks, and as text to be copied, in lines of its own. Nothing
    is said of a plan that no search chose.
    """
    if plan.fast is None:
        return
    fast = f"Fast: {_describe_expectation(plan.fast)}"
    if plan.proven is not None and plan.proven.layout != plan.layout:
        proven = describe_layout(plan.proven.layout).choices
        choices = [name for name in describe_layout(plan.layout).choices if name not in proven]
        if choices and plan.estimate.evidence.grade is not EvidenceGrade.MEASURED:
            fast += f"; adds {'; '.join(choices)}; nobody published all of it together"
    console.print(Text(f"{fast}."))
    if plan.proven is None:
        if plan.hardware.device.kind.is_accelerator:
            line = "Proven: nobody published a run of its choices on this part that is as fast."
            console.print(Text(line))
    elif plan.proven.layout == plan.layout:
        console.print(Text(f"Proven: the same; {_count_runs(plan.proven)}."))
    else:
        expected = _describe_expectation(plan.proven, first=plan.fast)
        labels = ", ".join(describe_layout(plan.proven.layout).brief_labels)
        console.print(Text(f"Proven: {labels}; {expected}; {_count_runs(plan.proven)}:"))
        _print_ranks(console, plan, plan.proven.layout)
        text = format_layout(plan.proven.layout)
        for line in _break_at_commas(text, console.width - len(_INDENT)):
            console.print(Text(f"{_INDENT}{line}"))


def _describe_expectation(answer: Recommendation, *, first: Recommendation | None = None) -> str:
    """Say what a layout is expected to take, and how that stands to published runs.

    A run that was named for the answer that stands `first` is not named again.
    """
    more = answer.expected_step_s / answer.step_s - 1
    text = f"expect {format_seconds(answer.expected_step_s)} a step"
    if more:
        text += f" ({more:+.1%}: picked from many)"
    run = answer.published
    if run is None:
        return text
    named = first.published if first is not None else None
    if named is not None and (named.id, named.differs) == (run.id, run.differs):
        text += f"; {run.ratio:.2f} x that run"
    else:
        text += f"; {run.ratio:.2f} x the nearest published run, on {run.devices:,} x {run.device}"
        # It says how many devices; runs of other models are none that an answer names.
        differs = [part for part in run.differs.split(", ") if part and not part[0].isdigit()]
        if differs:
            text += f" ({', '.join(differs)})"
    if run.even_ratio:
        text += f", {run.even_ratio:.2f} x with the even load that it was forced to have"
    if run.is_exceeded:
        text += f"; {run.ratio_of_best:.2f} x the fastest published of the model on this part"
    return text


def _count_runs(answer: Recommendation) -> str:
    return f"{plural(answer.runs, 'published run')} on this part made its choices"


def describe_evidence(evidence: Evidence) -> str:
    """Say how near measured runs come to an estimate, and which choices none made."""
    if evidence.grade is EvidenceGrade.MEASURED and evidence.runs:
        runs = plural(evidence.runs, "published run")
        return f"{runs} made all choices of the plan together"
    if evidence.measured == (OWN_RATES,):
        return "rates measured on this machine"
    text = _GRADES[evidence.grade]
    if evidence.formula:
        shown = ", ".join(map(_describe_choices, evidence.formula[:_NAMES_SHOWN]))
        more = len(evidence.formula) - _NAMES_SHOWN
        text += f": {shown}"
        if more > 0:
            text += f" and {more} more"
    return text


def _describe_choices(name: str) -> str:
    """Return one choice, or a pair of them, as a reader says it: "H800 with offload=moe_act"."""
    return JOIN.join(_describe_choice(choice) for choice in name.split(JOIN))


def _describe_choice(choice: str) -> str:
    key, _, value = choice.replace("~", "=").partition("=")
    match key:
        case "part":
            return value
        case "parameters":
            return f"about {_format_parameters(10 ** float(value[2:]))} parameters"
        case "devices":
            return f"about {int(value):,} devices"
        case "network":
            return f"network {value}"
        case "ep-between":
            return "EP between nodes"
        case "tp" | "cp" | "pp" | "vpp" | "ep" | "etp":
            return key.upper()
        case _:
            return choice


def _format_parameters(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:,.0f}B"
    return f"{count / 1e6:,.0f}M"


def _ranking_table(console: Console, plans: Sequence[Plan], picked: Sequence[Plan]) -> Table:
    table = make_table(*_RANKING_COLUMNS, text_columns=("layout",))
    for rank, plan in enumerate(plans, 1):
        estimate = plan.estimate
        # A space behind each comma is where a long layout may wrap.
        layout = format_layout(plan.layout).replace(",", ", ")
        used = estimate.peak_bytes / estimate.capacity_bytes
        table.add_row(
            _mark_rank(rank, is_picked=plan in picked),
            Text(layout, style=_style_layout(is_picked=plan in picked)),
            format_seconds(estimate.step_s),
            format_figures(estimate.tokens_per_s_per_device),
            f"{format_figures(estimate.tflops_per_device)}",
            f"{estimate.mfu:.1%}",
            f"{format_bytes(estimate.peak_bytes)} {spell(console, draw_bar(used, _BAR_WIDTH))}",
            format_bytes(estimate.margin_bytes),
            _verdict_cell(estimate),
        )
    return table


def _mark_rank(rank: int, *, is_picked: bool) -> str:
    return f"> {rank}" if is_picked else str(rank)


def _style_layout(*, is_picked: bool) -> str:
    return "bold" if is_picked else ""


def _ranking_lines(plans: Sequence[Plan], picked: Sequence[Plan], width: int) -> Iterable[Text]:
    """Yield a line of figures a plan, and its layout below, for layouts that no column holds.

    What a layout has and the first has not stands before its text. Those behind the third are
    counted: an answer is a screen.
    """
    yield Text(f"{'':3}{'step':>10}{'tok/s/dev':>12}{'MFU':>8}{'peak':>11}   verdict", style="bold")
    for rank, plan in enumerate(plans, 1):
        if rank > _SPELLED_PLANS and plan not in picked:
            continue
        estimate = plan.estimate
        mark = _mark_rank(rank, is_picked=plan in picked)
        figures = Text(
            f"{mark:>3}{format_seconds(estimate.step_s):>10}"
            f"{format_figures(estimate.tokens_per_s_per_device):>12}{estimate.mfu:>8.1%}"
            f"{format_bytes(estimate.peak_bytes):>11}   "
        )
        yield figures.append_text(_verdict_cell(estimate))
        changes = summarize_changes(plan.layout, plans[0].layout)
        if changes:
            yield Text(f"{_INDENT}{changes}")
        for line in _break_at_commas(format_layout(plan.layout), width - len(_INDENT)):
            yield Text(f"{_INDENT}{line}", style=_style_layout(is_picked=plan in picked))
    rest = [plan.estimate.step_s for plan in plans[_SPELLED_PLANS:] if plan not in picked]
    if rest:
        # Figures that are written alike are said once.
        steps = " to ".join(dict.fromkeys(map(format_seconds, (min(rest), max(rest)))))
        yield Text(f"{_INDENT}{plural(len(rest), 'plan')} more at {steps} a step, with -v")


def _break_at_commas(text: str, width: int) -> Iterable[str]:
    """Yield the text in lines of at most `width` characters that end with commas."""
    line = ""
    for part in re.findall("[^,]+,?", text):
        if line and len(line) + len(part) > width:
            yield line
            line = ""
        line += part
    yield line


def _verdict_cell(estimate: Estimate) -> Text:
    verdict = f"{estimate.verdict.value} {estimate.fit_probability:.0%}"
    return draw_phrase(Phrase(text=verdict, tone=VERDICT_TONES[estimate.verdict]))


def _rejections(rejected: Sequence[tuple[str, int]]) -> Iterator[DocumentSection]:
    """Yield how many layouts each rule rejected, the most first, where a long answer is wanted."""
    rows = sorted(rejected, key=lambda pair: (-pair[1], pair[0]))
    if rows:
        table = build_table(
            (*numbers("layouts"), *words("rule")), [(f"{count:,}", rule) for rule, count in rows]
        )
        yield DocumentSection(title="Rejected", table=table, extent=Extent.LONG)
