"""The parts of a run's page that are words: verdict, figures of routers, incidents, sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median

from moewright.diagnosis.compare_ledgers import LedgerComparison
from moewright.report.document import (
    DocumentSection,
    Extent,
    Table,
    Tone,
    build_table,
    numbers,
    words,
)
from moewright.rules.steady_steps import median_step_s, steady_steps
from moewright.spec.run import EvalRecord, Incident, LayerLoad, RunRecord, Session, StepRecord
from moewright.spec.units import format_bytes, format_figures, format_seconds, plural

# No loss is as large, but for one that was not finite.
_NO_NUMBER = 1e300
# Loads of experts are means over at most this many last steps.
LOAD_STEPS = 10
_ROUTER_COLUMNS = (
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A key figure of the run with a label and a note."""

    label: str
    value: str
    note: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class RunVerdict:
    """The run in one sentence and a few tiles."""

    sentence: str
    tone: Tone
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Learning:
    """The judgement of whether the model learned: a clause, its tone, and the loss as a tile."""

    clause: str
    tone: Tone
    tile: Tile


def build_verdict(record: RunRecord, comparisons: Sequence[LedgerComparison]) -> RunVerdict:
    """Build the verdict on a run: whether the model learned, step time and ledger."""
    estimate = record.plan.estimate
    measured_s = median_step_s(record)
    predicted_s = estimate.step_s
    error = 0.0
    if measured_s:
        error = (predicted_s - measured_s) / measured_s
    error_text = f"{abs(error):.1%} too {'low' if error < 0 else 'high'}"
    step_note = f"predicted {format_seconds(predicted_s)}, {error_text}"
    learning = _judge_learning(record)
    ledger = _judge_ledgers(comparisons)
    clauses = [learning.clause]
    if measured_s and estimate.untimed:
        clauses += [f"a step took {format_seconds(measured_s)}", estimate.untimed]
        step_note = estimate.untimed
    elif measured_s:
        clauses.append(
            f"a step took {format_seconds(measured_s)} where {format_seconds(predicted_s)} "
            f"was predicted, {error_text}"
        )
    elif record.steps:
        clauses.append("no step was done under this layout yet")
    clauses.append(ledger.note)
    steps = steady_steps(record)
    rate = median([step.tokens_per_s_per_rank for step in steps] or [0.0])
    mfu = median([step.mfu for step in steps] or [0.0])
    tiles: tuple[Tile, ...] = (
        learning.tile,
        Tile(
            label="Step time",
            value=format_seconds(measured_s),
            note=step_note,
        ),
        Tile(label="Speed", value=format_figures(rate), note="tokens/s/rank, median"),
        Tile(label="MFU", value=f"{mfu:.1%}", note=f"predicted {estimate.mfu:.1%}"),
        Tile(
            label="Predicted peak",
            value=format_bytes(estimate.peak_bytes),
            note=f"{estimate.verdict}: {format_bytes(estimate.capacity_bytes)} a rank",
        ),
        Tile(label="Ledger", value=ledger.value, note=ledger.label, tone=ledger.tone),
    )
    if record.steps and record.copied_step >= 0:
        tiles += (_describe_copies(record),)
    tone = Tone.BAD if ledger.tone is Tone.BAD else learning.tone
    return RunVerdict(sentence=f"{'; '.join(clauses)}.", tone=tone, tiles=tiles)


def _describe_copies(record: RunRecord) -> Tile:
    """Say what a loss of this machine would cost after the last copy, and at the worst step."""
    age = max(0, record.steps[-1].step - record.copied_step)
    worst = max(step.copy_age for step in record.steps)
    return Tile(
        label="Newest copy elsewhere",
        value=f"{plural(age, 'step')} old" if record.copied_step else "none",
        note=f"in the end; at worst {plural(worst, 'step')} old",
        tone=Tone.BAD.where(not record.copied_step),
    )


def describe_learning(record: RunRecord) -> str:
    """Say whether the model learned, as a clause."""
    return _judge_learning(record).clause


def _judge_learning(record: RunRecord) -> _Learning:
    if not record.steps:
        tile = Tile(label="Training loss", value="none", note="no step was recorded")
        return _Learning(clause="No step was recorded", tone=Tone.BAD, tile=tile)
    broken_steps = sum(1 for step in record.steps if not is_number(step.loss))
    if record.steps[-1].rewards.pairs:
        return _judge_preferences((record.evals or record.steps)[-1], broken_steps)
    if not record.evals:
        return _judge_training_loss(record.steps[-1], broken_steps)
    # A rate that rises between the last two steps is of warm-up.
    rates = [step.lr for step in record.steps[-2:]]
    return _judge_heldout_loss(record.evals[-1], broken_steps, is_warming_up=rates[0] < rates[-1])


def is_number(loss: float) -> bool:
    """Tell a loss from one that was not finite, which a run records as the largest float."""
    return isfinite(loss) and abs(loss) < _NO_NUMBER


def _judge_training_loss(last: StepRecord, broken_steps: int) -> _Learning:
    loss = f"{last.loss:.3f}" if is_number(last.loss) else "no number of"
    return _Learning(
        clause=(
            f"{plural(last.step, 'step')} ran and the training loss ended at {loss} nats/token "
            "(no held-out data)"
        ),
        tone=Tone.BAD.where(bool(broken_steps)),
        tile=Tile(label="Training loss", value=loss, note="nats/token; no held-out data"),
    )


def _judge_preferences(last: EvalRecord | StepRecord, broken_steps: int) -> _Learning:
    """Judge a run by its held-out pairs, or without those by its last step's."""
    accuracy = f"{last.rewards.accuracy:.0%}"
    kind = "held-out pairs" if isinstance(last, EvalRecord) else "pairs of the last step"
    has_learned = last.rewards.margin > 0 and not broken_steps
    return _Learning(
        clause=(
            f"After {plural(last.step, 'step')} the chosen answer has the greater reward in "
            f"{accuracy} of {last.rewards.pairs:,} {kind}, by {last.rewards.margin:.3f} on average"
        ),
        tone=Tone.judge(holds=has_learned),
        tile=Tile(label="Preferences", value=accuracy, note=f"won, of {kind}"),
    )


def _judge_heldout_loss(last: EvalRecord, broken_steps: int, *, is_warming_up: bool) -> _Learning:
    gain = last.unigram_entropy - last.heldout_loss
    has_learned = gain > 0 and not broken_steps
    if gain > 0:
        position = f"{gain:.2f} below"
    elif isfinite(gain):
        position = f"{-gain:.2f} above"
    else:
        position = "not comparable with"
    tone = Tone.BAD
    subject = "The model did not train"
    if has_learned:
        tone = Tone.GOOD
        subject = "The model trained"
    elif is_warming_up and not broken_steps:
        tone = Tone.PLAIN
        subject = "Too early to say whether the model trains, as the learning rate still rises"
    clause = (
        f"{subject}: its held-out loss after {plural(last.step, 'step')} is "
        f"{last.heldout_loss:.3f} nats/token, {position} the unigram entropy of "
        f"{last.unigram_entropy:.3f}"
    )
    if broken_steps:
        clause += f", and {plural(broken_steps, 'step')} had a loss that is no number"
    note = f"nats/token; unigram entropy {last.unigram_entropy:.3f}"
    tile = Tile(label="Held-out loss", value=f"{last.heldout_loss:.3f}", note=note, tone=tone)
    return _Learning(clause=clause, tone=tone, tile=tile)


def _judge_ledgers(comparisons: Sequence[LedgerComparison]) -> Tile:
    """Return the ledgers in short: value and label for the tile, note for the sentence."""
    if not comparisons:
        return Tile(label="no counted ledger", value="none", note="no ledger was counted")
    ranks = len(comparisons)
    exact = sum(comparison.is_exact for comparison in comparisons)
    bounded = sum(comparison.is_within_bound for comparison in comparisons)
    accounted = sum(comparison.is_accounted for comparison in comparisons)
    if exact == bounded == accounted == ranks:
        note = "the ledger is exact and saved activations are within 3%"
        return Tile(label=f"on {ranks} of {ranks} ranks", value="exact", note=note, tone=Tone.GOOD)
    failures = (
        ("the ledger differs", ranks - exact),
        ("saved activations exceed 3%", ranks - bounded),
        ("storages live that no row lists", ranks - accounted),
    )
    note = " and ".join(f"{name} on {count} of {ranks} ranks" for name, count in failures if count)
    value = "differs" if min(exact, accounted) < ranks else "exact"
    return Tile(label=note, value=value, note=note, tone=Tone.BAD)


def list_load_window(record: RunRecord) -> tuple[StepRecord, ...]:
    """Return the last steps under the plan's layout whose expert loads were recorded.

    There are none of a run without MoE layers.
    """
    return tuple(step for step in record.planned_steps if step.loads)[-LOAD_STEPS:]


def build_router_table(window: Sequence[StepRecord]) -> Table:
    """Build the figures of every layer's router, means over a window of steps."""
    layers = [load.layer for load in window[-1].loads]
    rows = (
        _list_router_cells([load for step in window for load in step.loads if load.layer == layer])
        for layer in layers
    )
    return build_table((*words("layer"), *numbers(*_ROUTER_COLUMNS)), rows)


def _list_router_cells(loads: Sequence[LayerLoad]) -> Iterator[str]:
    """Yield the figures of one layer's router from its loads over the window."""

    def mean(figure: Callable[[LayerLoad], float]) -> float:
        return fmean(map(figure, loads))

    hottest_rank = [
        max(load.rank_counts) * len(load.rank_counts) / max(1, sum(load.counts))
        for load in loads
        if load.rank_counts
    ]
    yield str(loads[0].layer)
    yield f"{mean(lambda load: sum(load.counts) / len(load.counts)):,.1f}"
    yield f"{mean(lambda load: load.max_over_mean):.2f}"
    yield f"{mean(lambda load: load.p95_over_mean):.2f}"
    yield f"{mean(lambda load: load.dead_experts):.1f}"
    yield f"{mean(lambda load: load.entropy):.3f}"
    yield f"{fmean(hottest_rank):.2f}" if hottest_rank else "–"
    yield f"{mean(lambda load: load.dropped_share):.1%}"
    yield f"{mean(lambda load: load.aux_loss + load.seq_aux_loss + load.global_aux_loss):.3g}"
    yield f"{mean(lambda load: load.z_loss):.3g}"


def list_incidents(incidents: Sequence[Incident]) -> Iterator[DocumentSection]:
    """Yield what ended the ranks of a run, and a sentence on what it cost; none of a whole run."""
    if not incidents:
        return
    ended = [incident for incident in incidents if _has_gone_on(incident)]
    summary = plural(len(incidents), "incident")
    if ended:
        lost = format_seconds(sum(incident.lost_s for incident in ended))
        mean = format_seconds(fmean(incident.down_s for incident in ended))
        steps = sum(incident.repeated_steps for incident in ended)
        summary += f"; {lost} lost, {plural(steps, 'step')} repeated"
        summary += f", {mean} to go on in the mean (MTTR)"
    columns = (
        *words("noticed", "kind", "what", "the way on"),
        *numbers("steps repeated", "time lost"),
    )
    yield DocumentSection(
        title="Incidents",
        lines=(f"{summary}.",),
        table=build_table(columns, map(_list_incident_cells, incidents)),
    )


def _list_incident_cells(incident: Incident) -> Iterator[str]:
    yield from (incident.time, incident.kind.value, incident.message, _describe_way_on(incident))
    has_gone_on = _has_gone_on(incident)
    yield str(incident.repeated_steps) if has_gone_on else ""
    yield format_seconds(incident.lost_s) if has_gone_on else ""


def _has_gone_on(incident: Incident) -> bool:
    """Tell whether the ranks were ended, and the run has gone on since."""
    return bool(incident.resumed_step) and incident.kind.ends_ranks


def _describe_way_on(incident: Incident) -> str:
    if not incident.kind.ends_ranks:
        return "has gone on meanwhile"
    if not incident.resumed_step:
        return incident.gave_up or "has not gone on"
    way_on = f"from step {incident.resumed_step} in {format_seconds(incident.down_s)}"
    if incident.next_layout == incident.layout:
        return way_on
    return f"{way_on}, {incident.layout} became {incident.next_layout}"


def build_session_section(sessions: Sequence[Session]) -> DocumentSection:
    """Build a row for each session: when it began, where, and under which layout."""
    columns = (
        *words("started"),
        *numbers("first step", "ranks"),
        *words("layout"),
        *numbers("threads a rank"),
        *words("device", "torch", "routing"),
    )
    rows = (
        (
            session.started,
            f"{session.first_step:,}",
            f"{session.world_size:,}",
            session.layout or "–",
            f"{session.threads_per_rank:,}",
            session.device_name,
            session.torch_version,
            session.routing,
        )
        for session in sessions
    )
    return DocumentSection(
        title=plural(len(sessions), "session"),
        table=build_table(columns, rows),
        extent=Extent.WHOLE,
    )
