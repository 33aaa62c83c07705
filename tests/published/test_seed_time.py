"""Step times of Qwen3-235B on 256 H800 with balanced routing.

They are 12 lines of the Pai-Megatron-Patch MoE guide. The shipped constants are a fit of a larger
published set that has these lines too; test_fit_time leaves them out.
"""

from __future__ import annotations

import csv
from pathlib import Path

from moewright.calibration.splits import rank_correlation
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.workload import Routing, Workload

SEQ_LEN = 4096
WORLD = 256


def test_step_times_have_the_measured_order_and_small_errors() -> None:
    with (Path(__file__).parent / "data" / "seed0.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware(f"{WORLD}xH800")
    predicted = []
    measured = []
    errors = []
    for row in rows:
        workload = Workload(
            routing=Routing.BALANCED, seq_len=SEQ_LEN, global_batch=int(row["global_batch"])
        )
        layout = parse_layout(row["layout"], world_size=WORLD)
        prediction = estimate(model, workload, hardware, layout)
        measured.append(int(row["global_batch"]) * SEQ_LEN / WORLD / float(row["step_s"]))
        predicted.append(prediction.tokens_per_s_per_device)
        errors.append(abs(prediction.step_s / float(row["step_s"]) - 1))
    assert len(rows) == 12
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.12
    assert rank_correlation(predicted, measured) > 0.93
    chosen = measured[predicted.index(max(predicted))]
    assert 1 - chosen / max(measured) < 0.015
