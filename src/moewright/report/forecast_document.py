"""A forecast of expert loads as a document."""

from __future__ import annotations

from math import isfinite

from moewright.diagnosis.load_forecast import LoadForecast, PlacementOffer
from moewright.report.document import Document, DocumentSection, build_table, numbers, words
from moewright.spec.units import format_bytes, format_seconds, plural


def build_forecast_document(subject: str, forecast: LoadForecast) -> Document:
    """Build a table of the layers, and one of placements that are made for the load ahead."""
    layers = build_table(
        numbers("layer", "hottest rank", "now", "ahead", "8 of 10", "balanced", "a replica each"),
        (
            (
                str(layer.layer),
                str(layer.hottest_rank),
                f"{layer.now:.2f}",
                f"{layer.expected:.2f}",
                f"{layer.low:.2f} to {layer.high:.2f}",
                f"{layer.balanced:.2f}",
                f"{layer.replicated:.2f}",
            )
            for layer in forecast.layers
        ),
    )
    offers = build_table(
        (*words("layout"), *numbers("a step", "gains", "experts moved", "takes", "pays after")),
        (
            (
                offer.layout,
                format_seconds(offer.step_s),
                f"{offer.gain_s / forecast.step_s:+.1%}",
                f"{offer.moved_experts:,}, {format_bytes(offer.moved_bytes)}",
                format_seconds(offer.move_s),
                _describe_pay(offer),
            )
            for offer in forecast.offers
        ),
    )
    note = (
        f"With the placement of the run {format_seconds(forecast.step_s)} a step is predicted. A "
        "move takes the weights and states of the rank that receives most, over the slowest link "
        "of its group."
    )
    return Document(
        subject=subject,
        heading=forecast.title(),
        sections=(
            DocumentSection(title="Rows of the hottest rank over the mean", table=layers),
            DocumentSection(title="Placements for that load", table=offers, notes=(note,)),
        ),
    )


def _describe_pay(offer: PlacementOffer) -> str:
    if not isfinite(offer.pays_after):
        return "never"
    return plural(max(1, round(offer.pays_after)), "step")
