"""A search as pages show it: ranked plans, other candidates, the Pareto front, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_changes, describe_layout
from moewright.search.search import SearchResult
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan, Recommendation, WhatIf
from moewright.spec.quoting import Html
from moewright.spec.record import Record, Row, spread
from moewright.spec.units import format_seconds, mention
from moewright.view.layout_view import SHOWN_NAMES, LayoutView, build_layout_view, render_layout
from moewright.view.plan_view import ListedFigures, NamedValue, list_figures

_MOST_POINTS = 300  # more would hide each other, and make the page heavy


class RankedKind(StrEnum):
    """How a layout came to a ranking."""

    PLAN = "plan"  # estimated in full, fits as probably as asked for
    GAMBLE = "gamble"  # estimated in full, faster or likelier than nothing, may not fit
    CANDIDATE = "candidate"  # screened: its figures are those of the search


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedPlan:
    """A layout of a ranking with what is compared; a candidate has no speed and no grade.

    `labels` are what its layout has and the first has not.
    """

    kind: RankedKind
    layout: str
    words: str
    labels: tuple[str, ...] = ()
    figures: ListedFigures = field(metadata=spread(*(item.name for item in fields(ListedFigures))))
    is_on_front: bool = False
    trainers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GainView:
    """What one change of the job would make of the best step."""

    change: str
    layout: str
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerView:
    """An answer of a search: the fastest layout, or the fastest that somebody ran on the part.

    `adds` are the choices of its layout that the other answer has not, and `published` says how its
    speed stands to measured runs.
    """

    title: str
    shown: LayoutView = field(metadata=spread(*SHOWN_NAMES))
    step_s: float
    expected_step_s: float
    runs: int
    grade: str
    adds: tuple[str, ...]
    published: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SearchView(Record):
    """The answer of a search: layouts with their figures, best first, and why.

    `answers` are the fastest layout and the fastest that somebody ran, once, where they are the
    same. `is_final` is false for what a first search in a part of the space gave.
    """

    ranked: tuple[RankedPlan, ...]
    why: tuple[str, ...]
    gains: tuple[GainView, ...]
    rejected: tuple[NamedValue, ...]
    scored: int
    capacity_bytes: int
    is_final: bool
    answers: tuple[AnswerView, ...] = ()

    def title(self) -> str:
        """Return the first layout."""
        return self.ranked[0].layout if self.why else "no layout fits"

    def to_rows(self) -> list[Row]:
        """Return a row for each layout that was estimated in full."""
        return [
            {
                "layout": item.layout,
                "step_s": item.figures.step_s,
                "peak_bytes": item.figures.peak_bytes,
            }
            for item in self.ranked
            if item.kind is not RankedKind.CANDIDATE
        ]


def build_search_view(
    plans: Sequence[Plan],
    result: SearchResult,
    why: Sequence[str],
    *,
    trainers: Mapping[Layout, tuple[str, ...]],
    is_final: bool,
) -> SearchView:
    """Build the record of a search; `trainers` are what starts the layouts of `plans`."""
    estimated = [
        *((RankedKind.PLAN, plan) for plan in plans),
        *((RankedKind.GAMBLE, plan) for plan in result.gambles),
    ]
    shown = [_rank_plan(plan, kind, estimated[0][1], trainers) for kind, plan in estimated]
    capacity = 0
    gains: tuple[WhatIf, ...] = ()
    if plans:
        capacity = plans[0].estimate.capacity_bytes
        gains = plans[0].gains
    texts = {item.layout for item in shown}
    for candidate in result.near_best[:_MOST_POINTS]:
        layout = format_layout(candidate.layout)
        if layout not in texts:
            shown.append(
                RankedPlan(
                    kind=RankedKind.CANDIDATE,
                    layout=layout,
                    words=describe_layout(candidate.layout).sentence,
                    figures=ListedFigures(
                        step_s=candidate.step_s,
                        peak_bytes=round(candidate.peak_bytes),
                        fit_probability=candidate.fit_probability(capacity),
                    ),
                )
            )
    return SearchView(
        ranked=mark_front(shown),
        why=tuple(why),
        gains=tuple(
            GainView(change=gain.change, layout=format_layout(gain.layout), step_s=gain.step_s)
            for gain in gains
        ),
        rejected=tuple(NamedValue(name=rule, value=count) for rule, count in result.rejected),
        scored=result.scored,
        capacity_bytes=capacity,
        is_final=is_final,
        answers=build_answers(plans[0]) if plans else (),
    )


def build_answers(plan: Plan) -> tuple[AnswerView, ...]:
    """Return the answers that a search gave beside its first plan; () where it was not whole."""
    fast, proven = plan.fast, plan.proven
    node = plan.hardware.fabric.devices_per_node
    if fast is None:
        return ()
    if proven is None:
        return (_build_answer("Fastest, and nobody published a run like it", fast, fast, node),)
    if proven.layout == fast.layout:
        return (_build_answer("Fastest, and proven by published runs", fast, fast, node),)
    return (
        _build_answer("Fastest", fast, proven, node),
        _build_answer("Fastest that somebody ran", proven, fast, node),
    )


def _build_answer(
    title: str, answer: Recommendation, other: Recommendation, node: int
) -> AnswerView:
    shown = build_layout_view(answer.layout, node)
    other_choices = describe_layout(other.layout).choices
    run = answer.published
    published = ""
    if run is not None:
        published = (
            f"{run.ratio:.2f} x the nearest published run: {run.devices:,} x {run.device}"
            f"{mention(', but {}', run.differs) or ', the same job'}"
        )
    return AnswerView(
        title=title,
        shown=shown,
        step_s=answer.step_s,
        expected_step_s=answer.expected_step_s,
        runs=answer.runs,
        grade=answer.grade.value,
        adds=tuple(
            choice
            for choice in describe_layout(answer.layout).choices
            if choice not in other_choices
        ),
        published=published,
    )


def render_answers(answers: Sequence[AnswerView]) -> Html:
    """Return the answers of a search for a notebook."""
    return Html.concat(map(_render_answer, answers))


def _render_answer(answer: AnswerView) -> Html:
    return Html.write(
        '<div style="margin-bottom:1em">{}<br>{}<br>expect {} a step{}</div>\n',
        answer.title,
        render_layout(answer.shown),
        format_seconds(answer.expected_step_s),
        mention("; {} published runs made its choices", answer.runs),
    )


def _rank_plan(
    plan: Plan, kind: RankedKind, first: Plan, trainers: Mapping[Layout, tuple[str, ...]]
) -> RankedPlan:
    return RankedPlan(
        kind=kind,
        layout=format_layout(plan.layout),
        words=describe_layout(plan.layout).sentence,
        labels=describe_changes(plan.layout, first.layout),
        figures=list_figures(plan.estimate),
        trainers=trainers.get(plan.layout, ()),
    )


def mark_front(ranked: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Return the layouts with those marked that no other beats in both time and memory."""
    front = set()
    least_bytes = float("inf")
    figures = [item.figures for item in ranked]
    for index in sorted(
        range(len(ranked)), key=lambda item: (figures[item].step_s, figures[item].peak_bytes)
    ):
        if figures[index].peak_bytes < least_bytes:
            least_bytes = figures[index].peak_bytes
            front.add(index)
    return tuple(replace(item, is_on_front=index in front) for index, item in enumerate(ranked))
