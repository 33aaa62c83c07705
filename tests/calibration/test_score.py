"""The scorer against hand-worked tables: errors, ranks with ties, regret, verdicts, units."""

from __future__ import annotations

import csv
from math import hypot, log
from pathlib import Path

import pytest

from moewright.calibration.columns import COLUMNS
from moewright.calibration.cross_validate import calibrate_as_shipped
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.score import Calibration, Score, score_table
from moewright.calibration.software_facts import source_facts
from moewright.calibration.splits import HEAVY_TAILS, rank_correlation
from moewright.calibration.table import MeasurementTable, read_table
from moewright.spec.hardware import Constant
from moewright.spec.plan import Verdict
from moewright.spec.units import GB, Sourced, SourceKind

BASE = {
    "source": "a guide",
    "model": "Qwen3-30B-A3B",
    "hardware": "H100",
    "num_gpus": "16",
    "precision": "bf16",
    "seq_len": "4096",
    "gbs": "64",
    "mbs": "1",
    "tp": "1",
    "pp": "1",
    "ep": "16",
    "recompute_granularity": "full",
    "cuda_graph": "none",
    "force_balance": "true",
}


def table(folder: Path, *changes: dict[str, str]) -> MeasurementTable:
    path = folder / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(
            {**BASE, "id": f"a-{index}", **change} for index, change in enumerate(changes)
        )
    return read_table(path)


def predicted(folder: Path, *changes: dict[str, str]) -> list[float]:
    """Return the planner's speeds of rows, to write tables whose errors are known."""
    rows = score_table(
        table(folder, *({**change, "tokens_per_s_per_gpu": "1"} for change in changes))
    ).rows
    return [row.predicted_tokens_per_s_per_gpu or 0.0 for row in rows]


LAYOUTS = ({"ep": "16"}, {"ep": "8"}, {"ep": "8", "pp": "2"})


def scored(folder: Path, factors: tuple[float, ...]) -> Score:
    """Score three layouts whose measured speed is the predicted one times a factor."""
    speeds = predicted(folder, *LAYOUTS)
    rows = [
        {**layout, "tokens_per_s_per_gpu": str(speed * factor)}
        for layout, speed, factor in zip(LAYOUTS, speeds, factors, strict=True)
    ]
    return score_table(table(folder, *rows))


def test_errors_and_group(tmp_path: Path) -> None:
    summary = scored(tmp_path, (1.0, 1.25, 0.8)).summary
    assert summary.complete_speeds is not None
    assert summary.complete_speeds.rows == 3
    # Predicted over measured: 1, 0.8, 1.25.
    assert summary.complete_speeds.median_error == pytest.approx(0.2)
    assert summary.complete_speeds.mean_error == pytest.approx(0.15)
    assert summary.complete_speeds.bias == pytest.approx(0.05 / 3)
    (group,) = summary.groups
    assert (group.model, group.hardware, group.layouts) == ("Qwen/Qwen3-30B-A3B", "H100", 3)


def test_splits_are_over_all_timed_rows(tmp_path: Path) -> None:
    changes = (
        {},
        {"publisher": "other", "cuda_graph": "", "ep": "8"},
        {"force_balance": "false", "ep": "8", "pp": "2"},
    )
    rows = table(tmp_path, *({**change, "tokens_per_s_per_gpu": "9e9"} for change in changes))
    counts = {
        (split.by, split.name): split.speeds.rows for split in score_table(rows).summary.splits
    }
    assert counts == {
        ("moe", "all"): 3,
        ("moe, stated", "complete"): 1,
        ("moe, stated", "switches unstated"): 1,
        ("moe, stated", "natural routing"): 1,
        ("moe, publisher", "a"): 2,
        ("moe, publisher", "other"): 1,
    }


def test_each_row_has_its_own_intervals(tmp_path: Path) -> None:
    speeds = {"tokens_per_s_per_gpu": "1000", "peak_memory_gb": "40"}
    changes = ({**speeds}, {**speeds, "force_balance": "false"})
    plain, natural = score_table(table(tmp_path, *changes), calibrate_as_shipped).rows
    for row in (plain, natural):
        for narrow, wide, value in (
            (row.interval_80, row.interval_95, row.predicted_tokens_per_s_per_gpu),
            (row.peak_interval_80, row.peak_interval_95, row.predicted_peak_memory_gb),
        ):
            assert narrow is not None
            assert wide is not None
            assert value is not None
            assert wide[0] < narrow[0] < value < narrow[1] < wide[1]
    assert (natural.interval_80 or (1.0, 1.0))[1] / (
        natural.predicted_tokens_per_s_per_gpu or 1
    ) > (plain.interval_80 or (1.0, 1.0))[1] / (plain.predicted_tokens_per_s_per_gpu or 1)


def test_a_trainer_that_nobody_fitted_widens_the_interval(tmp_path: Path) -> None:
    changes = [
        {"tokens_per_s_per_gpu": "1000", "force_balance": balance, "framework": framework}
        for balance in ("true", "false")
        for framework in ("megatron", "a trainer of one's own")
    ]
    rows = score_table(table(tmp_path, *changes), calibrate_as_shipped).rows
    deviations = [
        log((row.interval_80 or (1.0, 1.0))[1] / (row.predicted_tokens_per_s_per_gpu or 1.0))
        / HEAVY_TAILS.width_80
        for row in rows
    ]
    spread = source_facts().stack_spread.log_sd
    for fitted, other in (deviations[:2], deviations[2:]):
        assert other == pytest.approx(hypot(fitted, spread))
    own = table(tmp_path, {**changes[1], "source": ""})
    assert calibrate_as_shipped(own.rows[0]).log_sd is None


def test_regret_is_what_the_layout_predicted_best_loses(tmp_path: Path) -> None:
    speeds = predicted(tmp_path, *LAYOUTS)
    best = max(range(3), key=speeds.__getitem__)
    factors = [1.0, 1.0, 1.0]
    # The layout predicted best is measured slowest, at half the next.
    factors[best] = min(speeds) / speeds[best] / 2
    summary = scored(tmp_path, tuple(factors)).summary
    others = [speed for index, speed in enumerate(speeds) if index != best]
    assert summary.worst_regret == pytest.approx(1 - min(speeds) / 2 / max(others))
    assert summary.mean_rank_correlation is not None
    assert summary.mean_rank_correlation < 0.5


def test_ranks_share_a_place_when_equal() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5).
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert rank_correlation([1, 1], [1, 2]) == 0


def test_a_calibration_reaches_the_rows_and_is_named(tmp_path: Path) -> None:
    rows = table(tmp_path, {"tokens_per_s_per_gpu": "1000"})
    slow = Constant(
        name="step_tail_s", value=Sourced(value=100.0, kind=SourceKind.FITTED, source="a test")
    )

    def calibrate(row: MeasuredRow) -> Calibration:
        return Calibration(constants=(slow,), source=f"fitted for {row.id}")

    plain = score_table(rows).rows[0]
    fitted = score_table(rows, calibrate).rows[0]
    assert plain.predicted_tokens_per_s_per_gpu is not None
    assert fitted.predicted_tokens_per_s_per_gpu is not None
    assert fitted.predicted_tokens_per_s_per_gpu < plain.predicted_tokens_per_s_per_gpu / 2
    assert fitted.calibration.startswith("fitted for a-0")
    assert plain.calibration.startswith("the planner's own constants")


def test_verdicts_and_skipped_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    small = {"tokens_per_s_per_gpu": "1000"}
    huge = {"recompute_granularity": "none", "mbs": "4"}
    maybe = {**huge, "recompute_granularity": "", "source": "", "tokens_per_s_per_gpu": "1000"}
    scored_table = score_table(table(tmp_path, small, {"mbs": ""}, {**huge, "oom": "true"}, maybe))
    assert [row.id for row in scored_table.rows] == ["a-0", "a-1", "a-2", "a-3"]
    assert [row.verdict for row in scored_table.rows] == [
        Verdict.FITS,
        None,
        Verdict.OOM,
        Verdict.UNCERTAIN,
    ]
    assert scored_table.rows[1].skipped == "id=a-1: states neither speed nor memory"
    assert scored_table.rows[2].measured_oom
    assert "recompute, which may have been on" in scored_table.rows[3].calibration
    memory = scored_table.summary.memory
    assert (memory.ran, memory.ran_fits, memory.ran_uncertain) == (2, 1, 1)
    assert (memory.out_of_memory, memory.out_of_memory_fits, memory.out_of_memory_uncertain) == (
        1,
        0,
        0,
    )


def test_a_run_over_the_capacity_that_leaves_cells_open_may_have_fitted(tmp_path: Path) -> None:
    """90 GB of 85, and 131: the same job is out of memory where it states all, or did not run."""
    stated = {
        "recompute_granularity": "none",
        "seq_len": "6144",
        "tokens_per_s_per_gpu": "1000",
    }
    part = {**stated, "force_balance": ""}
    much_more = {**part, "mbs": "2"}
    rows = score_table(table(tmp_path, stated, part, {**part, "oom": "true"}, much_more)).rows
    assert [row.verdict for row in rows] == [
        Verdict.OOM,
        Verdict.UNCERTAIN,
        Verdict.OOM,
        Verdict.UNCERTAIN,
    ]
    assert "which what the row leaves open may change" in rows[1].calibration


def test_a_peak_is_predicted_in_the_unit_and_sense_of_the_row(tmp_path: Path) -> None:
    kinds = ("GiB allocated", "GB as printed", "GiB reserved", "GB, whole device")
    changes = [{"peak_memory_gb": "40", "peak_memory_kind": kind} for kind in kinds]
    rows = score_table(table(tmp_path, *changes, {"tokens_per_s_per_gpu": "1000"})).rows
    gib, gb, reserved, device, unstated = (row.predicted_peak_memory_gb or 0.0 for row in rows)
    assert gb == pytest.approx(gib * 1.024**3)
    assert gib < reserved < device * GB / 1024**3
    # A monitor of the device reads more than what a peak is made of.
    assert device - unstated == pytest.approx(source_facts().device_monitor.extra_bytes / GB)
