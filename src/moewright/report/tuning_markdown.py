"""A tuning as Markdown: what was tried and why, predicted beside measured, what was kept, why it
stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from statistics import fmean, stdev

from moewright.spec.finding import Basis, Waterfall
from moewright.spec.units import format_bytes, format_seconds
from moewright.tuning.contract import Contract
from moewright.tuning.decisions import Decision, IncumbentProfile, Ruling, TuningPhase, TuningResult
from moewright.tuning.paired_test import Interval, t_quantile
from moewright.tuning.space import TuningPoint
from moewright.tuning.trials import VALIDATION_WINDOW

_FINDINGS, _DROPS = 3, 6
_RAN = (Ruling.START, Ruling.KEPT, Ruling.SLOWER, Ruling.NO_GAIN, Ruling.FAILED)


def render_tuning(contract: Contract, result: TuningResult, *, basis: Basis) -> str:
    """The whole report; `basis` says whether step times were measured."""
    parts = [
        f"# Tuning of {contract.model} on {contract.hardware}, {contract.world_size} ranks",
        "",
        *_verdict(result, basis),
        "",
        "## Contract",
        "",
        *_contract(contract),
        "",
    ]
    for phase in TuningPhase:
        decisions = [one for one in result.decisions if one.phase is phase]
        stop = next((why for where, why in result.stops if where is phase), "")
        if not decisions and not stop:
            continue
        parts += [f"## {phase.capitalize()}", ""]
        if phase is TuningPhase.RETUNE:
            parts += _profiles(result.profiles, basis)
        parts += [*_table(decisions, basis), ""] if decisions else []
        parts += [f"Ended: {stop}.", ""] if stop else []
    parts += _validation(result)
    return "\n".join(parts)


def format_decision(decision: Decision, basis: Basis) -> str:
    """One decision for a terminal."""
    figure = (
        f"{format_seconds(decision.step_s)} {basis}, "
        if decision.step_s and basis is Basis.MEASURED
        else ""
    )
    figure += (
        f"{format_seconds(decision.predicted_s)} predicted"
        if decision.predicted_s
        else "no prediction"
    )
    gain = f"; {_gain(decision.interval)}" if decision.interval and basis is Basis.MEASURED else ""
    said = f" ({decision.reason})" if decision.reason else ""
    return f"{decision.phase}: {decision.point}: {decision.ruling}{gain}; {figure}{said} [{decision.why}]"


def _verdict(result: TuningResult, basis: Basis) -> Iterator[str]:
    if result.winner is None:
        yield "**No layout was found that runs and is valid.**"
        return
    yield f"**Winner: `{result.winner}`**"
    first = next((one for one in result.decisions if one.ruling is Ruling.START), None)
    if result.total_interval is not None:
        yield f"Against the start `{first.point if first else result.start}`, in turns: {_gain(result.total_interval)}."
    elif first is not None and basis is Basis.PREDICTED:
        last = [one for one in result.decisions if one.point == result.winner][-1]
        share = 1 - last.predicted_s / first.predicted_s
        yield f"Against the start `{first.point}`: {share:.1%} less time a step (predicted)."
    if basis is Basis.MEASURED:
        sd = f"{result.noise.sd:.1%} ({result.noise.degrees_of_freedom} degrees of freedom)"
        yield (
            f"{result.point_count} points in {result.run_count} runs, {result.spent_s / 60:.1f} min; "
            f"two runs of one point in a row differ by a standard deviation of {sd}."
        )
    else:
        yield f"{result.point_count} points estimated; nothing ran: every figure is predicted."


def _contract(contract: Contract) -> Iterator[str]:
    rows = (
        ("figures are", contract.label),
        ("versions", f"moewright {contract.moewright}, torch {contract.torch or 'not used'}"),
        ("machine", f"{contract.hardware} {contract.machine}, {contract.world_size} ranks"),
        ("model", f"{contract.model} ({contract.parameters})"),
        ("data", contract.data or "none"),
        ("routing", contract.routing),
        ("precision", contract.precision),
        ("sequence, global batch", f"{contract.seq_len} tokens, {contract.global_batch} sequences"),
        ("window", contract.window),
        ("start", f"`{contract.start}`"),
        (
            "may change",
            "; ".join(f"{a.key}: {', '.join(a.values)}" for a in contract.axes)
            or "whatever is usual",
        ),
    )
    yield from ("frozen | value", "-- | --")
    yield from (f"{name} | {_cell(str(value))}" for name, value in rows)


def _table(decisions: list[Decision], basis: Basis) -> Iterator[str]:
    measured = basis is Basis.MEASURED
    head = ["tried", "why", "predicted step", "to the incumbent", "predicted memory"]
    head += ["measured step", "less time a step (95 % interval)", "runs"] if measured else []
    head += ["ruling"]
    yield " | ".join(head)
    yield " | ".join("--" for _ in head)
    for one in decisions:
        cells = [
            f"`{one.point}`",
            one.why,
            format_seconds(one.predicted_s) if one.predicted_s else "-",
            f"{one.predicted_ratio - 1:+.1%}" if one.predicted_ratio else "-",
            format_bytes(one.predicted_peak_bytes) if one.predicted_peak_bytes else "-",
        ]
        if measured:
            cells += [
                format_seconds(one.step_s) if one.step_s else "-",
                _gain(one.interval) if one.interval else "-",
                str(one.run_count) if one.ruling in _RAN else "-",
            ]
        cells.append(f"{one.ruling}{': ' + one.reason if one.reason else ''}")
        yield " | ".join(map(_cell, cells))


def _gain(found: Interval) -> str:
    pairs = f"{found.pairs} pair{'s' if found.pairs > 1 else ''}"
    return f"{found.gain:.1%} ({found.least_gain:.1%} to {found.most_gain:.1%}, {pairs})"


def _profiles(profiles: tuple[IncumbentProfile, ...], basis: Basis) -> Iterator[str]:
    """Walls of each incumbent, and where its step went."""
    for profile in profiles:
        outcome = profile.outcome
        yield f"Profile of `{profile.point}` ({basis}):"
        yield ""
        yield from (
            f"- {one.wall} ({one.cause}): {one.title}" for one in outcome.findings[:_FINDINGS]
        )
        if outcome.waterfall is not None:
            yield f"- {_fall(outcome.waterfall)}"
        yield ""


def _fall(fall: Waterfall) -> str:
    drops = sorted(
        (drop for drop in fall.drops if drop.seconds > 0), key=lambda drop: -drop.seconds
    )[:_DROPS]
    said = ", ".join(f"{drop.name} {format_seconds(drop.seconds)} ({drop.basis})" for drop in drops)
    return f"ideal {format_seconds(fall.ideal_s)}, {said}; in all {format_seconds(fall.measured_s)}"


def _validation(result: TuningResult) -> Iterator[str]:
    outcome = result.validated
    if outcome is None:
        return
    yield f"Of `{result.winner}`: " if result.winner else "Of the last that was tried:"
    yield ""
    yield from ("check | | seen", "-- | -- | --")
    yield from (
        f"{one.name} | {'yes' if one.passed else 'NO'} | {_cell(one.said)}"
        for one in outcome.checks
    )
    yield ""
    window = (
        f"A step took {format_seconds(outcome.wall_step_s)} by the clock over the last {VALIDATION_WINDOW} steps, and would take "
        f"{format_seconds(outcome.step_s)} with a core for every rank (measured, all settled steps)"
    )
    yield f"{window}. Overlap leaves no row in the ledger: that it pays is shown by its pairs alone."
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def render_exhaustive(
    means: Mapping[TuningPoint, float],
    *,
    runs: int,
    winner: TuningPoint,
    best: TuningPoint,
    paired_s: Sequence[tuple[float, float]],
    tuning_points: int,
    tuning_runs: int,
) -> str:
    """Every point of a space by its measured step, and how near a tuning's winner comes to the
    best. `duel` are seconds of winner and best in turns.
    """
    ranked = sorted(means, key=lambda point: means[point])
    near = means[best] / means[winner]
    said = [
        "# Tuning beside every point of its space",
        "",
        f"- best of {len(means)} points in {runs} runs: `{best}`, {format_seconds(means[best])} a step",
        f"- winner of the tuning: `{winner}`, {format_seconds(means[winner])} a step in the same rounds: {near:.1%} of "
        f"the best's speed, place {ranked.index(winner) + 1}",
        f"- the tuning ran {tuning_points} points ({tuning_points / len(means):.0%}) in {tuning_runs} runs ({tuning_runs / runs:.0%})",
    ]
    if paired_s:
        ratios = [log(theirs / ours) for ours, theirs in paired_s]
        sd = stdev(ratios) if len(ratios) > 1 else 0.0
        half = (
            t_quantile(0.975, len(ratios) - 1) * sd / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        )
        mean = fmean(ratios)
        said.append(
            f"- in turns, {len(ratios)} pairs: {exp(mean):.1%} of the best's speed "
            f"(95 % interval {exp(mean - half):.1%} to {exp(mean + half):.1%})"
        )
    rows = [
        f"`{point}` | {format_seconds(means[point])} | {means[best] / means[point]:.1%}"
        for point in ranked
    ]
    return "\n".join(
        [*said, "", "point | measured step | of the best's speed", "-- | -- | --", *rows, ""]
    )
