"""The fit of constants: recovers what made the runs, stays within bounds, and says what it does not know."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest

from moewright.cli.main import main
from moewright.codec import parse_layout
from moewright.cost.constants import Constants
from moewright.cost.prepared import Prepared
from moewright.intake import catalogue
from moewright.spec.hardware import Constant
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Workload
from moewright.tune.fit import FREE, Centre, Run, fit, leave_out

MODEL, HARDWARE = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("64xH100")
LAYOUTS = (
    "ep8,mbs1",
    "ep8,mbs4",
    "ep32,mbs1",
    "ep32,mbs2,dispatcher=deepep",
    "tp2,ep8,mbs2",
    "tp4,ep8,pp2,mbs1",
    "ep8,pp4,mbs1,recompute=full",
)


def constant(name: str, value: float) -> Constant:
    return Constant(name=name, value=Sourced(value=value, kind=SourceKind.ASSUMED, source="test"))


def runs(layouts: tuple[str, ...] = LAYOUTS, **truth: float) -> tuple[Run, ...]:
    """Runs as a machine with these constants would time them."""
    work = Workload(seq_len=4096, global_batch=1024)
    changed = tuple(constant(name, value) for name, value in truth.items())
    found = []
    for text in layouts:
        prepared = Prepared(MODEL, work, HARDWARE, parse_layout(text, world_size=64))
        found.append(Run(id=text, prepared=prepared, hardware=HARDWARE, measured_s=prepared.step_s(changed)))
    return tuple(found)


def test_every_free_constant_is_one_of_the_model_and_its_prior_lies_in_its_bounds() -> None:
    known = Constants(HARDWARE)
    for one in FREE:
        assert known[one.name] >= 0
        assert one.low <= one.prior <= one.high
        assert one.low <= known[one.name] <= one.high


def test_recovers_a_host_that_is_half_as_fast() -> None:
    slow = 2 * Constants(HARDWARE)["host_s_per_layer_microbatch"]
    found = fit(runs(host_s_per_layer_microbatch=slow), centre=Centre.HARDWARE)
    host = next(one for one in found.estimated("H100") if one.name == "host_s_per_layer_microbatch")
    assert abs(log(host.value / slow)) < 2.5 * host.sd
    assert host.value > 1.4 * host.prior
    assert host.sd < 0.8 * host.prior_sd


def test_three_runs_suffice_and_what_they_do_not_show_stays() -> None:
    found = fit(runs(LAYOUTS[:3], alltoall_between_time_scale=1.5), centre=Centre.HARDWARE)
    by_name = {one.name: one for one in found.estimated("H100")}
    unseen = by_name["ep_overlap_hidden"]
    assert unseen.value == pytest.approx(unseen.prior)
    assert unseen.sd == pytest.approx(unseen.prior_sd, rel=1e-6)
    assert by_name["alltoall_between_time_scale"].value > by_name["alltoall_between_time_scale"].prior


def test_values_stay_in_bounds_whatever_was_measured() -> None:
    wild = tuple(replace(run, measured_s=50 * run.measured_s) for run in runs())
    found = fit(wild)
    for one, free in zip(
        sorted(found.estimated("H100"), key=lambda e: e.name), sorted(FREE, key=lambda f: f.name), strict=True
    ):
        assert free.low <= one.value <= free.high


def test_one_wild_run_does_not_carry_the_fit_away() -> None:
    good = runs()
    spoilt = (replace(good[0], measured_s=3 * good[0].measured_s), *good[1:])
    found = fit(spoilt, centre=Centre.HARDWARE)
    errors = [run.prepared.step_s(found.constants(HARDWARE)) / run.measured_s - 1 for run in good[1:]]
    assert max(map(abs, errors)) < 0.12


def test_a_measured_run_narrows_what_it_shows() -> None:
    first, last = runs()[:3], runs()[4]
    found = fit(first, centre=Centre.HARDWARE)
    promised = {one.name: one.sd for one in found.after(last, "H100")}["tp_host"]
    before, now = (
        {one.name: one.sd for one in fit(some, centre=Centre.HARDWARE).estimated("H100")}["tp_host"]
        for some in (first, (*first, last))
    )
    assert now < before
    assert promised == pytest.approx(now, rel=0.05)
    assert found.spread(last) > 0.5 * found.spread(first[0])


def test_left_out_runs_are_predicted_by_the_others() -> None:
    scale = exp(0.2)
    slow = tuple(replace(run, measured_s=scale * run.measured_s) for run in runs())
    predicted = leave_out(slow, lambda run: run.id, centre=Centre.HARDWARE)
    for run, seconds in zip(slow, predicted, strict=True):
        assert 0 < log(seconds / run.prepared.step_s(())) < 0.25


def table(path: Path, count: int) -> Path:
    columns = "id model hardware num_gpus precision seq_len gbs mbs tp pp ep recompute_granularity cuda_graph"
    names = [*columns.split(), "dispatcher", "force_balance", "time_per_iter_s"]
    times = (("1", "8", "26.0"), ("2", "8", "42.0"), ("1", "16", "33.0"), ("2", "16", "51.0"))
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(names)
        for i, (mbs, ep, seconds) in enumerate(times[:count]):
            row = [f"r{i}", "Qwen3-30B-A3B", "H100", "16", "bf16", "4096", "1024", mbs, "1", "1", ep, "none", "none"]
            out.writerow([*row, "alltoall", "true", seconds])
    return path


def test_the_verb_writes_a_hardware_file_that_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    assert main(["fit", str(table(tmp_path / "t.csv", 3)), "--on", "H100", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "next, measure Qwen/Qwen3-30B-A3B in" in said
    assert "each run left out of its fit" in said
    mine, stock = catalogue.hardware(f"16x{out}"), catalogue.hardware("16xH100")
    fitted = [one for one in mine.constants if "t.csv" in one.value.source]
    assert fitted
    assert all(one.value.kind is SourceKind.FITTED and "3 runs" in one.value.source for one in fitted)
    assert mine.device == stock.device
    assert mine.fabric == stock.fabric


def test_two_runs_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", str(table(tmp_path / "t.csv", 2)), "--on", "H100", "--out", str(tmp_path / "mine.toml")]
    assert main(arguments) == 2
    assert "a fit needs 3" in capsys.readouterr().err
    assert not (tmp_path / "mine.toml").exists()
