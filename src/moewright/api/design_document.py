"""A design as a document and as a page: the front, the chosen shape, and what each law says."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.api.designing import Design, describe_level
from moewright.cost.loss_laws import DENSE_LAW, read_laws
from moewright.report.document import (
    Column,
    Document,
    DocumentSection,
    Extent,
    Face,
    Line,
    Phrase,
    build_table,
    numbers,
    words,
)
from moewright.search.design import DesignedShape
from moewright.spec.model import AttentionKind, AttentionSpec
from moewright.spec.options import DesignOptions
from moewright.spec.units import (
    format_bytes,
    format_count,
    format_figures,
    format_seconds,
    plural,
)
from moewright.view.design_view import DesignView, ShapePoint, ShapeRole

_SHOWN = 12  # shapes of the front in a short answer


def build_design_document(design: Design) -> Document:
    """Build the front, the chosen shape, and the laws that it rests on."""
    return Document(
        heading=design.title(),
        sections=(
            _build_front(design),
            _build_choice(design),
            _build_published(design),
            _build_laws(design),
        ),
        hint="-v shows the whole front, what each law predicts, and where it is extrapolated.",
    )


def _build_front(design: Design) -> DocumentSection:
    rows = [_list_cells(shape, design=design) for shape in design.front]
    reference: tuple[Line, ...] = ()
    if design.like is not None:
        reference = _list_cells(design.like, design=design)
    notes = [
        f"{design.tried:,} shapes, of which {design.timed} were timed in template layouts and the "
        f"front of these, {design.planned}, searched in full: layouts and days are of full plans.",
        *_list_unknown_to_laws(design.options),
        describe_level(design.level),
    ]
    if design.chosen.prediction.outside:
        count = len(design.chosen.prediction.outside)
        notes.append(
            f"The chosen shape lies outside the runs of {count} of "
            f"{len(design.chosen.prediction.by_law)} laws: its loss is extrapolated."
        )
    return DocumentSection(
        title="No shape beats these in loss, days, parameters and memory of serving",
        table=build_table(_list_columns(design), rows, short=_SHOWN, total=reference),
        notes=tuple(notes),
    )


def _list_unknown_to_laws(options: DesignOptions) -> Iterator[str]:
    """Yield what loss laws do not know of what was varied."""
    if options.attention_kinds or options.kv_heads or options.vocab_sizes:
        yield (
            "No loss law knows attention or vocabulary: they change speed, memory and serving "
            "only, for as many tokens."
        )
    if options.shared_experts:
        yield "Of shared experts one law of five knows more than their size: five factors."


def _list_columns(design: Design) -> tuple[Column, ...]:
    names = ("total", "active", "tokens", "days", "loss", "interval", "serving", "life, h")
    absent = _list_absent(design)
    return (*words("shape"), *numbers(*(name for name in names if name not in absent)))


def _list_absent(design: Design) -> set[str]:
    """Return the columns that say nothing: the days where the question gave them all."""
    absent = set()
    if design.options.days:
        absent.add("days")
    if not design.options.served_tokens:
        absent.add("life, h")
    return absent


def _list_cells(shape: DesignedShape, *, design: Design) -> tuple[Line, ...]:
    prediction = shape.prediction
    cells = {
        "shape": shape.model.name,
        "total": format_count(shape.total),
        "active": format_count(shape.active),
        "tokens": format_count(shape.tokens),
        "days": format_figures(shape.days),
        "loss": f"{prediction.loss:.3f}",
        "interval": f"{prediction.low:.3f}-{prediction.high:.3f}",
        "serving": format_bytes(shape.serving_bytes),
        "life, h": f"{shape.life_hours:,.0f}",
    }
    absent = _list_absent(design)
    return tuple(cell for name, cell in cells.items() if name not in absent)


def _build_choice(design: Design) -> DocumentSection:
    model, serving = design.chosen.model, design.serving
    moe = model.moe
    experts = "none"
    if moe is not None:
        experts = f"{moe.experts}, {moe.router.top_k} a token, {moe.ffn_size:,} wide"
        if moe.shared_ffn_size:
            experts += f", {moe.shared_ffn_size:,} shared"
    estimate = design.plan.estimate
    return DocumentSection(
        title=f"{_name_goal(design)}: {model.name}",
        facts=(
            ("width, layers", f"{model.hidden_size:,}, {model.layers}"),
            ("attention", _describe_attention(model.attention)),
            ("vocabulary", f"{model.vocab_size:,}"),
            ("experts", experts),
            ("layout", Phrase(text=design.chosen.layout, face=Face.CODE)),
            (
                "step",
                f"{format_seconds(estimate.step_s)}, MFU {estimate.mfu:.1%}, "
                f"{design.chosen.tokens_per_s:,.0f} tokens/s",
            ),
            (
                "serving in bf16",
                f"{format_bytes(serving.weight_bytes)} of weights and "
                f"{format_bytes(serving.cache_bytes)} of cache for {serving.batch} x "
                f"{serving.context:,} tokens, on {plural(serving.devices, 'device')}",
            ),
            (
                "decoding, at most",
                f"{serving.tokens_per_s:,.0f} tokens/s by bandwidth; a batch reads "
                f"{serving.unique_experts:.0f} experts of a layer",
            ),
        ),
    )


def _describe_attention(attention: AttentionSpec) -> str:
    heads = f"{attention.heads} heads of {attention.head_dim}"
    if attention.kind is AttentionKind.MLA:
        return f"{heads}, latent keys and values of {attention.kv_lora_rank}"
    return f"{heads}, {attention.kv_heads} of keys and values"


def _build_published(design: Design) -> DocumentSection:
    """Build what published models of about the chosen size would come to, trained as it is."""
    rows = [_list_cells(shape, design=design) for shape in design.published]
    chosen = _list_cells(design.chosen, design=design)
    note = "Their shapes on these devices, not the losses that their publishers trained them to."
    return DocumentSection(
        title="Published models of about its size, trained like it",
        table=build_table(_list_columns(design), rows, total=chosen),
        notes=(note,) if rows else ("The catalogue has none that fits.",),
        extent=Extent.LONG,
    )


def _name_goal(design: Design) -> str:
    if not design.options.until:
        return "Least loss"
    return "Fewest device-hours" if design.options.served_tokens else "Fewest days"


def _build_laws(design: Design) -> DocumentSection:
    losses = dict(design.chosen.prediction.by_law)
    rows = [
        (law.name, f"{losses[law.name]:.3f}", law.source)
        for law in read_laws()
        if law.name != DENSE_LAW
    ]
    columns = (*words("law"), *numbers("loss"), *words("source"))
    return DocumentSection(
        title="What the laws say of the chosen shape, at one level",
        table=build_table(columns, rows),
        notes=tuple(f"outside: {text}" for text in design.chosen.prediction.outside),
        extent=Extent.LONG,
    )


def build_design_view(design: Design) -> DesignView:
    """Build the answer as a page draws it."""
    front = [shape for shape in design.front if shape.model != design.chosen.model]
    published = list(design.published)
    if design.like is not None:
        published.append(design.like)
    roles = (
        (ShapeRole.CHOSEN, [design.chosen]),
        (ShapeRole.FRONT, front),
        (ShapeRole.PUBLISHED, published),
    )
    # By name: a model that has two roles is drawn once.
    points = {
        shape.model.name: _build_point(role, shape) for role, shapes in roles for shape in shapes
    }
    return DesignView(document=build_design_document(design), points=tuple(points.values()))


def _build_point(role: ShapeRole, shape: DesignedShape) -> ShapePoint:
    prediction = shape.prediction
    return ShapePoint(
        role=role,
        name=shape.model.name,
        total=shape.total,
        active=shape.active,
        tokens=shape.tokens,
        days=shape.days,
        loss=prediction.loss,
        interval=(prediction.low, prediction.high),
    )
