"""Forecasts of expert loads beside two naive ones, on recorded loads.

    python -m benchmarks.load_records AHEAD RECORD...

A record is the folder of a run, or a text in which somebody printed counts of tokens as
`(layer, tensor([5295, 4616, ...]))`, as MOE/RoutingAnalysis.md of MiguelBenalcazar/research does
(at 24d14786). Each is forecast AHEAD records ahead from five of its own, over as many ranks as its
experts allow, of 2, 3, 4, 6 and 8. The rivals are its latest value and the mean of what was. What
came is the median of twelve records around that place.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import log
from pathlib import Path

import numpy as np

from moewright.codec import read_run, read_text
from moewright.diagnosis.load_forecast import LEAST_RECORDS, SURE, Floats, forecast_history

_PRINTED = re.compile(r"\((\d+), tensor\(\[([\d, ]+)\]\)\)")
_RANKS = (2, 3, 4, 6, 8)
_PLACES = 5  # from which a record is forecast
_AROUND = 6  # records on either side of what is forecast


def read_histories(path: Path) -> list[Floats]:
    """Return the tokens of the experts by record, [records, experts], of each layer."""
    layers: defaultdict[int, list[list[float]]] = defaultdict(list)
    if path.is_dir():
        for step in read_run(path).steps:
            for load in step.loads:
                layers[load.layer].append([float(count) for count in load.counts])
    else:
        for layer, counts in _PRINTED.findall(read_text(path)):
            layers[int(layer)].append([float(count) for count in counts.split(",")])
    least = min(map(len, layers.values()), default=0)
    return [np.array(rows[:least]) + 1e-6 for rows in layers.values()]  # no expert is divided by 0


def compare(history: Floats, ahead: int, ep: int) -> Iterator[tuple[float, float, float, bool]]:
    """Yield how far the logarithm of the hottest rank's rows was off: forecast, latest, mean.

    The last value says whether what came lies in the interval of 8 in 10.
    """
    shares = history / history.sum(axis=1, keepdims=True)
    singles = np.log(shares.reshape(len(shares), ep, -1).sum(axis=2).max(axis=1) * ep)
    last = len(history) - ahead
    for place in np.unique(np.linspace(max(LEAST_RECORDS, last // 2), last, _PLACES).astype(int)):
        around = singles[place + ahead - _AROUND : place + ahead + _AROUND]
        came = float(np.median(around))
        told = forecast_history(history[:place], ahead, ep)
        error = log(told.factor) - came
        yield (
            abs(error),
            abs(float(singles[place - 1]) - came),
            abs(log(float(np.exp(singles[:place]).mean())) - came),
            abs(error) <= SURE * told.error,
        )


def main() -> int:
    """Print a row for each record; 1 where a forecast is further off than both rivals."""
    ahead = int(sys.argv[1])
    is_worse = False
    print("| record | cases | forecast | latest value | mean | in the interval of 8 in 10 |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in sys.argv[2:]:
        rows = [
            row
            for history in read_histories(Path(name))
            for ep in _RANKS
            if history.shape[1] % ep == 0 and history.shape[1] > ep
            for row in compare(history, ahead, ep)
        ]
        own, latest, mean, inside = np.array(rows, dtype=float).mean(axis=0)
        is_worse |= bool(own > max(latest, mean))
        print(f"| {name} | {len(rows)} | {own:.2%} | {latest:.2%} | {mean:.2%} | {inside:.0%} |")
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
