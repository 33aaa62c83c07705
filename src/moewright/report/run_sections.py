"""What the report says of the run itself: verdict, loss, ledger lines, expert load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import fmean, median

from moewright.diagnosis.compare_ledgers import AgreementRule as Promise
from moewright.diagnosis.compare_ledgers import LedgerComparison, LedgerLine, LineStatus, Section
from moewright.report.charts import (
    ChartAxis,
    HeatCell,
    HeatRow,
    Plot,
    Point,
    ReferenceLine,
    build_axis,
    build_curve,
    heat_level,
    ramp_colour,
)
from moewright.report.console import show_rate
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.run import LayerLoad, RunRecord
from moewright.spec.units import format_bytes, format_seconds

LOAD_STEPS = 10  # the heatmap is the mean over at most this many last steps
LOAD_POINTS = 4000  # of all curves of the load plot together
LAYER_COLUMNS = (
    "tokens an expert",
    "hottest expert",
    "95th percentile",
    "dead experts",
    "entropy",
    "hottest rank",
    "dropped",
    "balance loss",
    "z-loss",
)
SECTION_TITLES = {
    Section.MEMORY: "Memory held, bytes",
    Section.COMM: "Collective payload, bytes a step",
    Section.CALLS: "Collective calls a step",
    Section.FLOPS: "FLOPs a step",
    Section.IN_FLIGHT: "Micro-batches' chunks alive at once",
    Section.TIME: "Time, seconds of the counted step",
}


class Tone(StrEnum):
    GOOD = "good"
    BAD = "bad"
    PLAIN = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    label: str
    value: str
    note: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class RunVerdict:
    sentence: str
    tone: Tone
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    label: str
    predicted: str
    counted: str
    difference: str
    mark: str
    tone: Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerTable:
    title: str
    summary: str
    tone: Tone
    groups: tuple[tuple[str, tuple[LedgerRow, ...]], ...]
    notes: tuple[str, ...]
    opened: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterRow:
    """A router's figures, means over the window, as text in the order of LAYER_COLUMNS."""

    layer: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSection:
    """Heat rows are mean loads over `window`, those of `ranks` by EP rank; `layers` are the
    routers' figures; `plot` is the hottest expert's load over the steps, a curve a layer.
    """

    rows: tuple[HeatRow, ...]
    window: str
    scale: tuple[HeatCell, ...]
    ranks: tuple[HeatRow, ...]
    layers: tuple[RouterRow, ...]
    columns: tuple[str, ...]
    plot: Plot
    dead: str


def build_verdict(record: RunRecord, comparisons: Sequence[LedgerComparison]) -> RunVerdict:
    learned, tone, loss = _learning(record)
    measured, predicted = median_step_s(record), record.plan.estimate.step_s
    off = (predicted - measured) / measured if measured else 0.0
    error = f"{abs(off):.1%} too {'low' if off < 0 else 'high'}"
    pace = f"a step took {format_seconds(measured)} where {format_seconds(predicted)} was predicted, {error}"
    books = _books(comparisons)
    if books.tone is Tone.BAD:
        tone = Tone.BAD
    sentence = "; ".join((learned, *((pace,) if measured else ()), books.note))
    steps = steady_steps(record)
    rate = median([step.tokens_per_s_per_rank for step in steps] or [0.0])
    mfu = median([step.mfu for step in steps] or [0.0])
    estimate = record.plan.estimate
    tiles = (
        loss,
        Tile(
            label="Step time",
            value=format_seconds(measured),
            note=f"predicted {format_seconds(predicted)}, {error}",
        ),
        Tile(label="Speed", value=show_rate(rate), note="tokens/s/rank, median"),
        Tile(label="MFU", value=f"{mfu:.1%}", note=f"predicted {estimate.mfu:.1%}"),
        Tile(
            label="Predicted peak",
            value=format_bytes(estimate.peak_bytes),
            note=f"{estimate.verdict}: {format_bytes(estimate.capacity_bytes)} a rank",
        ),
        Tile(label="Ledger", value=books.value, note=books.label, tone=books.tone),
    )
    return RunVerdict(sentence=f"{sentence}.", tone=tone, tiles=tiles)


def _learning(record: RunRecord) -> tuple[str, Tone, Tile]:
    if not record.steps:
        return (
            "No step was recorded",
            Tone.BAD,
            Tile(label="Training loss", value="none", note="no step was recorded"),
        )
    broken = sum(1 for step in record.steps if not isfinite(step.loss))
    last = record.steps[-1]
    if not record.evals:
        said = f"{last.step} steps ran and the training loss ended at {last.loss:.3f} nats/token (no held-out data)"
        tile = Tile(
            label="Training loss", value=f"{last.loss:.3f}", note="nats/token; no held-out data"
        )
        return said, Tone.BAD if broken else Tone.PLAIN, tile
    end = record.evals[-1]
    gain = end.unigram_entropy - end.heldout_loss
    tone = Tone.GOOD if gain > 0 and not broken else Tone.BAD
    subject = "The model trained" if tone is Tone.GOOD else "The model did not train"
    place = (
        f"{gain:.2f} below"
        if gain > 0
        else f"{-gain:.2f} above"
        if isfinite(gain)
        else "not comparable with"
    )
    said = (
        f"{subject}: its held-out loss after {end.step} steps is {end.heldout_loss:.3f} nats/token, {place} "
        f"the unigram entropy of {end.unigram_entropy:.3f}"
    )
    if broken:
        said += f", and {broken} steps had a loss that is no number"
    note = f"nats/token; unigram entropy {end.unigram_entropy:.3f}"
    return (
        said,
        tone,
        Tile(label="Held-out loss", value=f"{end.heldout_loss:.3f}", note=note, tone=tone),
    )


def _books(comparisons: Sequence[LedgerComparison]) -> Tile:
    """Ledger in short: value and label for the tile, note for the sentence."""
    if not comparisons:
        return Tile(label="no counted ledger", value="none", note="no ledger was counted")
    exact = sum(each.is_exact for each in comparisons)
    bounded = sum(each.is_within_bound for each in comparisons)
    ranks = len(comparisons)
    if exact == bounded == ranks:
        note = "the ledger is exact and saved activations are within 3%"
        return Tile(label=f"on {ranks} of {ranks} ranks", value="exact", note=note, tone=Tone.GOOD)
    counts = (("the ledger differs", exact), ("saved activations exceed 3%", bounded))
    note = " and ".join(
        f"{name} on {ranks - good} of {ranks} ranks" for name, good in counts if good < ranks
    )
    value = "differs" if exact < ranks else "exact"
    return Tile(label=note, value=value, note=note, tone=Tone.BAD)


def build_loss_plot(record: RunRecord) -> Plot:
    """Training loss, held-out loss and the unigram entropy over the steps; resumes are marked."""
    train: list[Point] = [(step.step, step.loss) for step in record.steps]
    heldout: list[Point] = [(each.step, each.heldout_loss) for each in record.evals]
    entropies = sorted({each.unigram_entropy for each in record.evals})
    x = build_axis([at for at, _ in (*train, *heldout)], "step", integer_ticks=True, ticks=6)
    y = build_axis(
        [*(value for _, value in (*train, *heldout)), *entropies], "loss, nats per token"
    )
    return Plot(
        x=x,
        y=y,
        curves=(
            build_curve("training loss", "#3f6fa6", train, x, y),
            build_curve("held-out loss", "#c4605c", heldout, x, y, dots=True),
        ),
        levels=tuple(
            ReferenceLine(at=y.to_percent(each), text=f"unigram entropy {each:.3f}")
            for each in entropies
        ),
        marks=tuple(
            ReferenceLine(at=x.to_percent(session.first_step), text="resumed")
            for session in record.sessions
            if session.first_step > 1
        ),
    )


def build_ledger_table(comparison: LedgerComparison, *, opened: bool) -> LedgerTable:
    """Every line of one rank's comparison, by section; the summary counts promises kept."""
    bound = [line for line in comparison.lines if line.rule is not Promise.LISTED]
    kept = sum(line.keeps_rule for line in bound)
    good = kept == len(bound)
    groups = (
        (SECTION_TITLES[section], tuple(map(_ledger_row, comparison.lines_in(section))))
        for section in Section
    )
    return LedgerTable(
        title=f"Rank {comparison.rank}",
        summary=f"{kept} of {len(bound)} promised lines hold",
        tone=Tone.GOOD if good else Tone.BAD,
        groups=tuple((title, rows) for title, rows in groups if rows),
        notes=comparison.notes,
        opened=opened or not good,
    )


def _ledger_row(line: LedgerLine) -> LedgerRow:
    places = 4 if line.section is Section.TIME else 0
    predicted, counted, difference = (
        f"{value:,.{places}f}" for value in (line.predicted, line.counted, line.difference)
    )
    relative = (
        ""
        if line.relative_difference is None or line.status is LineStatus.EQUAL
        else f" ({line.relative_difference:+.2%})"
    )
    marks = {
        LineStatus.EQUAL: "equal",
        LineStatus.WITHIN: "within 3%",
        LineStatus.DIFFERS: "differs",
        LineStatus.ONLY_PREDICTED: "only predicted",
        LineStatus.ONLY_COUNTED: "only counted",
    }
    tone = (
        Tone.BAD
        if not line.keeps_rule
        else Tone.PLAIN
        if line.rule is Promise.LISTED
        else Tone.GOOD
    )
    return LedgerRow(
        label=line.label,
        predicted="" if line.status is LineStatus.ONLY_COUNTED else predicted,
        counted="" if line.status is LineStatus.ONLY_PREDICTED else counted,
        difference="0" if line.status is LineStatus.EQUAL else f"{difference}{relative}",
        mark=marks[line.status] + (", listed only" if line.rule is Promise.LISTED else ""),
        tone=tone,
    )


def build_expert_section(record: RunRecord) -> ExpertSection | None:
    """Load of the experts; None for a run without MoE layers."""
    steps = [step for step in record.steps if step.loads]
    if not steps:
        return None
    last = steps[-LOAD_STEPS:]
    layers = [load.layer for load in last[-1].loads]
    of_layer = [
        [load for step in last for load in step.loads if load.layer == layer] for layer in layers
    ]
    rows = tuple(
        _heat_row(str(loads[0].layer), [load.counts for load in loads], "expert")
        for loads in of_layer
    )
    ranked = len(last[-1].loads[0].rank_counts) > 1
    ranks = [
        _heat_row(str(loads[0].layer), [load.rank_counts for load in loads], "EP rank")
        for loads in of_layer
        if ranked
    ]
    ratios: dict[int, list[Point]] = {layer: [] for layer in layers}
    for step in steps:
        for load in step.loads:
            ratios[load.layer].append((step.step, load.max_over_mean))
    x = build_axis([step.step for step in steps], "step", integer_ticks=True, ticks=6)
    y = _ratio_axis([value for points in ratios.values() for _, value in points])
    limit = max(60, LOAD_POINTS // len(layers))
    curves = tuple(
        build_curve(
            f"layer {layer}",
            ramp_colour(place / max(1, len(layers) - 1)),
            ratios[layer],
            x,
            y,
            limit=limit,
        )
        for place, layer in enumerate(layers)
    )
    first, end = last[0].step, last[-1].step
    dead = sum(load.dead_experts for load in last[-1].loads)
    scale = (
        ("no token", 0.0),
        ("≤ 0.5 ×", 0.5),
        ("0.7 ×", 0.7),
        ("mean", 1.0),
        ("1.4 ×", 1.4),
        ("≥ 2 ×", 2.0),
    )
    return ExpertSection(
        rows=rows,
        window=f"mean over steps {first} to {end}" if first < end else f"step {end}",
        scale=tuple(HeatCell(level=heat_level(value), text=text) for text, value in scale),
        ranks=tuple(ranks),
        layers=tuple(map(_layer_row, of_layer)),
        columns=LAYER_COLUMNS,
        plot=Plot(x=x, y=y, curves=curves),
        dead=f"{dead} of {sum(len(load.counts) for load in last[-1].loads)} experts got no token in step {end}",
    )


def _ratio_axis(values: Sequence[float]) -> ChartAxis:
    return build_axis((1.0, *values), "hottest expert, x the mean load")


def _heat_row(layer: str, counted: Sequence[Sequence[int]], place_name: str) -> HeatRow:
    counts = [fmean(column) for column in zip(*counted, strict=True)]
    mean = fmean(counts) or 1.0
    parts = [count / mean for count in counts]
    return HeatRow(
        label=layer,
        cells=tuple(
            HeatCell(
                level=heat_level(part),
                text=f"layer {layer}, {place_name} {place}: {part:.2f} x the mean",
            )
            for place, part in enumerate(parts)
        ),
        summary=f"{max(parts):.2f}",
    )


def _layer_row(loads: Sequence[LayerLoad]) -> RouterRow:
    def mean(of: Callable[[LayerLoad], float]) -> float:
        return fmean(map(of, loads))

    hottest = [
        max(load.rank_counts) * len(load.rank_counts) / max(1, sum(load.counts))
        for load in loads
        if load.rank_counts
    ]
    return RouterRow(
        layer=str(loads[0].layer),
        values=(
            f"{mean(lambda load: sum(load.counts) / len(load.counts)):,.1f}",
            f"{mean(lambda load: load.max_over_mean):.2f}",
            f"{mean(lambda load: load.p95_over_mean):.2f}",
            f"{mean(lambda load: load.dead_experts):.1f}",
            f"{mean(lambda load: load.entropy):.3f}",
            f"{fmean(hottest):.2f}" if hottest else "–",
            f"{mean(lambda load: load.dropped_share):.1%}",
            f"{mean(lambda load: load.aux_loss + load.seq_aux_loss + load.global_aux_loss):.3g}",
            f"{mean(lambda load: load.z_loss):.3g}",
        ),
    )
