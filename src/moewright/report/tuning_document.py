"""A tuning as a document: what was tried and why, what was kept, and why each phase ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import fmean, stdev

from moewright.codec.layout_words import describe_layout
from moewright.report.document import (
    Document,
    DocumentSection,
    Face,
    ItemList,
    Line,
    Phrase,
    Table,
    build_table,
    join_runs,
    numbers,
    words,
)
from moewright.spec.finding import Basis, Waterfall
from moewright.spec.units import format_bytes, format_given, format_seconds, mention, plural
from moewright.tuning.decisions import (
    Decision,
    IncumbentProfile,
    Interval,
    Ruling,
    TuningPhase,
    TuningResult,
    t_quantile,
)
from moewright.tuning.journal import Contract
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import VALIDATION_WINDOW

_MAX_FINDINGS = 3  # on one screen
_MAX_DROPS = 6  # on one screen
# Rulings on points that ran.
_RAN = (Ruling.START, Ruling.KEPT, Ruling.SLOWER, Ruling.NO_GAIN, Ruling.FAILED)


def build_tuning_document(contract: Contract, result: TuningResult, *, basis: Basis) -> Document:
    """Build the whole report; `basis` tells whether step times were measured or predicted."""
    return Document(
        heading=f"Tuning of {contract.model} on {contract.hardware}, {contract.world_size} ranks",
        sections=(
            DocumentSection(lines=tuple(_list_verdict(result, basis))),
            DocumentSection(title="Contract", facts=tuple(_list_contract(contract))),
            *(section for phase in TuningPhase for section in _list_phase(phase, result, basis)),
            *_list_validation(result),
        ),
    )


def summarize_tuning(result: TuningResult, *, basis: Basis) -> tuple[str, ...]:
    """Return the answer of a tuning as lines for a terminal: winner, gain, steps to it, runner-up.

    The runner-up is the point predicted or measured nearest the winner that was not kept.
    """
    lines = list(map(join_runs, _list_verdict(result, basis)))
    lines += [
        f"kept: {decision.point} ({decision.why})"
        for decision in result.decisions
        if decision.ruling is Ruling.KEPT
    ]
    others = [
        decision
        for decision in result.decisions
        if decision.ruling not in (Ruling.KEPT, Ruling.FAILED)
        and decision.point != result.winner
        and _step_s(decision)
    ]
    if others:
        second = min(others, key=_step_s)
        second_basis = Basis.MEASURED if second.step_s else Basis.PREDICTED
        reason = ""
        if second.reason:
            reason = f" ({second.reason})"
        lines.append(
            f"runner-up: {second.point}: {second.ruling}; {format_seconds(_step_s(second))} "
            f"{second_basis}{reason}"
        )
    return tuple(lines)


def _step_s(decision: Decision) -> float:
    """Return the seconds of a step, measured where the point ran; 0 where nothing tells them."""
    return decision.step_s or decision.predicted_s


def format_decision(decision: Decision, basis: Basis) -> str:
    """Return one decision as a line for a terminal."""
    is_measured = basis is Basis.MEASURED
    figures = []
    if decision.step_s and is_measured:
        figures.append(f"{format_seconds(decision.step_s)} {basis}")
    if decision.predicted_s:
        figures.append(f"{format_seconds(decision.predicted_s)} predicted")
    else:
        figures.append("no prediction")
    line = f"{decision.phase}: {decision.point}: {decision.ruling}"
    if decision.interval and is_measured:
        line += f"; {_format_gain(decision.interval)}"
    line += f"; {', '.join(figures)}"
    if decision.reason:
        line += f" ({decision.reason})"
    return f"{line} [{decision.why}]"


def build_exhaustive_document(
    means: Mapping[TuningPoint, float],
    *,
    runs: int,
    winner: TuningPoint,
    best: TuningPoint,
    paired_s: Sequence[tuple[float, float]],
    tuning_points: int,
    tuning_runs: int,
) -> Document:
    """Build how near a tuning's winner comes to the best of all points of its space.

    `means` are the measured seconds a step of every point over all `runs`. `paired_s` are the
    seconds of the winner and of the best, run in turns. The tuning tried `tuning_points` points
    in `tuning_runs` runs.
    """
    ranked = sorted(means, key=lambda point: means[point])
    relative_speed = means[best] / means[winner]
    items: list[Line] = [
        (
            f"best of {plural(len(means), 'point')} in {plural(runs, 'run')}: ",
            _code(best),
            f", {format_seconds(means[best])} a step",
        ),
        (
            "winner of the tuning: ",
            _code(winner),
            f", {format_seconds(means[winner])} a step in the same rounds: {relative_speed:.1%} of "
            f"the best's speed, place {ranked.index(winner) + 1}",
        ),
        f"the tuning ran {tuning_points} points ({tuning_points / len(means):.0%}) in "
        f"{tuning_runs} runs ({tuning_runs / runs:.0%})",
    ]
    if paired_s:
        items.append(_format_paired_speed(paired_s))
    rows = (
        (_code(point), format_seconds(means[point]), f"{means[best] / means[point]:.1%}")
        for point in ranked
    )
    columns = (*words("point"), *numbers("measured step", "of the best's speed"))
    return Document(
        heading="Tuning beside every point of its space",
        sections=(
            DocumentSection(items=ItemList(items=tuple(items))),
            DocumentSection(table=build_table(columns, rows)),
        ),
    )


def _code(value: object) -> Phrase:
    return Phrase(text=str(value), face=Face.CODE)


def _format_paired_speed(paired_s: Sequence[tuple[float, float]]) -> str:
    """Return a line with the winner's speed over the best's, and its 95 % interval."""
    # By logarithms, in which twice and half as fast cancel out.
    log_ratios = [log(best_s / winner_s) for winner_s, best_s in paired_s]
    pairs = len(log_ratios)
    mean = fmean(log_ratios)
    half_width = 0.0
    if pairs > 1:
        half_width = t_quantile(0.975, pairs - 1) * stdev(log_ratios) / pairs**0.5
    return (
        f"in turns, {pairs} pairs: {exp(mean):.1%} of the best's speed "
        f"(95 % interval {exp(mean - half_width):.1%} to {exp(mean + half_width):.1%})"
    )


def _list_verdict(result: TuningResult, basis: Basis) -> Iterator[Line]:
    if result.winner is None:
        yield Phrase(text="No layout was found that runs and is valid.", face=Face.STRONG)
        return
    words = describe_layout(result.winner.layout).sentence
    yield Phrase(text="Winner:", face=Face.STRONG), f" {words}"
    yield "As text: ", _code(result.winner)
    start = next((item for item in result.decisions if item.ruling is Ruling.START), None)
    if result.total_interval is not None:
        start_point = start.point if start else result.start
        gain = _format_gain(result.total_interval)
        yield "Against the start ", _code(start_point), f", in turns: {gain}."
    elif start is not None and basis is Basis.PREDICTED:
        last = [item for item in result.decisions if item.point == result.winner][-1]
        share = 1 - last.predicted_s / start.predicted_s
        gain = f"{share:.1%} less time a step (predicted)"
        yield "Against the start ", _code(start.point), f": {gain}."
    if basis is Basis.MEASURED:
        freedom = f"{result.noise.degrees_of_freedom} degrees of freedom"
        yield (
            f"{plural(result.point_count, 'point')} in {plural(result.run_count, 'run')}, "
            f"{result.spent_s / 60:.1f} min; two runs of one point in a row differ by a standard "
            f"deviation of {result.noise.sd:.1%} ({freedom})."
        )
    else:
        points = plural(result.point_count, "point")
        yield f"{points} estimated; nothing ran: every figure is predicted."


def _list_contract(contract: Contract) -> Iterator[tuple[str, Line]]:
    axes = "; ".join(f"{axis.key}: {', '.join(axis.values)}" for axis in contract.axes)
    ranks = plural(contract.world_size, "rank")
    yield "figures are", str(contract.label)
    yield "versions", f"moewright {contract.moewright}, torch {contract.torch or 'not used'}"
    yield "machine", f"{contract.hardware} {contract.machine}, {ranks}"
    yield "model", f"{contract.model} ({contract.parameters})"
    yield "data", contract.data or "none"
    yield "routing", str(contract.routing)
    yield "precision", str(contract.precision)
    batch = f"{contract.seq_len} tokens, {contract.global_batch} sequences"
    yield "sequence, global batch", batch
    yield "window", str(contract.window)
    yield "start", _code(contract.start)
    yield "may change", axes or "whatever is usual"


def _list_phase(
    phase: TuningPhase, result: TuningResult, basis: Basis
) -> Iterator[DocumentSection]:
    decisions = [decision for decision in result.decisions if decision.phase is phase]
    stop = next((why for stopped, why in result.stops if stopped is phase), "")
    if not decisions and not stop:
        return
    profiles: tuple[DocumentSection, ...] = ()
    if phase is TuningPhase.RETUNE:
        profiles = tuple(_build_profile(profile, basis) for profile in result.profiles)
    yield DocumentSection(
        title=phase.capitalize(),
        table=_build_decision_table(decisions, basis),
        notes=(f"Ended: {stop}.",) if stop else (),
        sections=profiles,
    )


def _build_decision_table(decisions: Sequence[Decision], basis: Basis) -> Table:
    columns = [*words("tried", "why")]
    columns += numbers("predicted step", "to the incumbent", "predicted memory")
    if basis is Basis.MEASURED:
        columns += numbers("measured step", "less time a step (95 % interval)", "runs")
    columns += words("ruling")
    return build_table(columns, (_list_decision_cells(decision, basis) for decision in decisions))


def _list_decision_cells(decision: Decision, basis: Basis) -> Iterator[Line]:
    yield _code(decision.point)
    yield decision.why
    yield format_given(decision.predicted_s, format_seconds, "-")
    yield f"{decision.predicted_ratio - 1:+.1%}" if decision.predicted_ratio else "-"
    yield format_given(decision.predicted_peak_bytes, format_bytes, "-")
    if basis is Basis.MEASURED:
        yield format_given(decision.step_s, format_seconds, "-")
        yield format_given(decision.interval, _format_gain, "-")
        yield str(decision.run_count) if decision.ruling in _RAN else "-"
    yield str(decision.ruling) + mention(": {}", decision.reason)


def _format_gain(interval: Interval) -> str:
    pairs = plural(interval.pairs, "pair")
    return f"{interval.gain:.1%} ({interval.least_gain:.1%} to {interval.most_gain:.1%}, {pairs})"


def _build_profile(profile: IncumbentProfile, basis: Basis) -> DocumentSection:
    """Build the walls of an incumbent, and the largest drops of its waterfall."""
    outcome = profile.outcome
    items = [
        f"{finding.wall} ({finding.cause}): {finding.title}"
        for finding in outcome.findings[:_MAX_FINDINGS]
    ]
    if outcome.waterfall is not None:
        items.append(_format_waterfall(outcome.waterfall))
    return DocumentSection(
        title=f"Profile of {profile.point} ({basis})", items=ItemList(items=tuple(items))
    )


def _format_waterfall(waterfall: Waterfall) -> str:
    drops = [drop for drop in waterfall.drops if drop.seconds > 0]
    largest = sorted(drops, key=lambda drop: -drop.seconds)[:_MAX_DROPS]
    texts = ", ".join(
        f"{drop.name} {format_seconds(drop.seconds)} ({drop.basis})" for drop in largest
    )
    ideal = format_seconds(waterfall.ideal_s)
    return f"ideal {ideal}, {texts}; in all {format_seconds(waterfall.measured_s)}"


def _list_validation(result: TuningResult) -> Iterator[DocumentSection]:
    outcome = result.validated
    if outcome is None:
        return
    title = f"Checks of {result.winner}" if result.winner else "Checks of the last layout tried"
    rows = ((check.name, "yes" if check.passed else "NO", check.said) for check in outcome.checks)
    yield DocumentSection(
        title=title,
        table=build_table(words("check", "", "seen"), rows),
        notes=(
            f"A step took {format_seconds(outcome.wall_step_s)} by the clock over the last "
            f"{VALIDATION_WINDOW} steps, and would take {format_seconds(outcome.step_s)} with a "
            "core for every rank (measured, all steady steps). Overlap leaves no row in the "
            "ledger: that it pays is shown by its pairs alone.",
        ),
    )
