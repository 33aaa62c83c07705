"""The verb that forecasts the load of a run's experts."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import write_answer
from moewright.cli.option_types import JsonOption
from moewright.cli.options import AnswerOptions

_SHORT = AnswerOptions()


def forecast(
    run: Path,
    /,
    *,
    horizon: int = 1000,
    answer: AnswerOptions = _SHORT,
    json: JsonOption = None,
) -> int:
    """Forecast the load of a run's experts, and say which placement of them would pay.

    From the router statistics of a run of this engine: the hottest rank's rows over the mean, now
    and some steps ahead with the interval of 8 in 10, what a placement or replicas for that load
    would gain of a step, and what moving the experts takes. Exit codes: 0 forecast; 2 bad input.

    Parameters
    ----------
    run
        The folder of a run of this engine.
    horizon
        Steps ahead.
    json
        Write the forecast (layers, placements) to this file; "-": to standard output, and the text
        to standard error.
    """
    from moewright.api.run_comparisons import forecast_loads
    from moewright.report.document_text import print_document
    from moewright.report.forecast_document import build_forecast_document

    told = forecast_loads(run, horizon)
    document = build_forecast_document(str(run), told)
    with write_answer(told, json, html=answer.html, views=lambda: [document]) as console:
        print_document(console, document, verbose=answer.verbose)
    return 0
