"""`bench sweep`: published tables beside predictions, and real trials that are run once."""

import csv
from pathlib import Path

import pytest

from moewright.cli.main import main
from moewright.tuning.sweep import SweepTrial, read_trials, write_trial

RECIPES = Path(__file__).parents[2] / "recipes"


def read_rows(folder):
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("seed0_*.toml")), ids=lambda path: path.stem)
def test_published_tables_stand_beside_predictions(recipe, tmp_path, capsys):
    assert main(["bench", "sweep", str(recipe), "--predict", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "configuration | SeqLen | GBS | GPUs | time/iter (s) | tokens/GPU/s | TFLOP/s/GPU" in out
    rows = read_rows(tmp_path)
    assert rows
    for row in rows:
        tokens = int(row["GBS"]) * int(row["SeqLen"])
        tokens_per_s = tokens / int(row["GPUs"]) / float(row["time/iter (s)"])
        # The published tables agree with themselves as closely.
        assert float(row["tokens/GPU/s"]) == pytest.approx(tokens_per_s, rel=5e-4)
        if "imbalance" not in recipe.stem:
            # The worst error of the fit to these tables.
            assert abs(float(row["error"].rstrip("%"))) < 12
    assert (tmp_path / "table.svg").read_text().startswith("<svg")


def test_memory_is_drawn_by_component_and_by_module(tmp_path, capsys):
    recipe = str(RECIPES / "seed0_tp_vs_pp.toml")
    assert main(["bench", "sweep", recipe, "--predict", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("by component") == 2
    assert out.count("by module") == 2
    assert (tmp_path / "memory.svg").read_text().count(" by module") == 2


SWEEP = """
title = "t"
job = {{ model = "Qwen3-30B-A3B", on = "64xH800", seq_len = 4096, global_batch = 256, {even} }}
table = [{{ title = "t", row = [
  {{ name = "even", layout = "ep8", tokens = 1.0 }},
  {{ name = "hot", layout = "ep8", tokens = 1.0, {load} }},
] }}]
"""


EVEN = 'routing = "balanced"'


@pytest.mark.parametrize(
    "load", ['routing = "skewed", load_skew = 1.0', 'routing = "learned", load_factor = 1.5']
)
def test_a_row_says_how_its_experts_were_loaded(load, tmp_path):
    (tmp_path / "s.toml").write_text(SWEEP.format(load=load, even=EVEN))
    assert (
        main(["bench", "sweep", str(tmp_path / "s.toml"), "--predict", "--out", str(tmp_path)]) == 0
    )
    even, hot = (float(row["predicted time/iter (s)"]) for row in read_rows(tmp_path))
    assert hot > 1.02 * even


@pytest.mark.parametrize(
    "load", ["load_skew = 1.0", 'routing = "learned", load_factor = 0.5', 'routing = "measured"']
)
def test_a_load_without_its_routing_is_refused(load, tmp_path, capsys):
    (tmp_path / "s.toml").write_text(SWEEP.format(load=load, even=EVEN))
    assert (
        main(["bench", "sweep", str(tmp_path / "s.toml"), "--predict", "--out", str(tmp_path)]) == 2
    )
    assert 'row "hot"' in capsys.readouterr().err


def test_a_published_sweep_is_not_run(tmp_path, capsys):
    assert main(["bench", "sweep", str(RECIPES / "seed0_best.toml"), "--out", str(tmp_path)]) == 2
    assert "--predict" in capsys.readouterr().err


def test_trials_are_kept_and_a_torn_line_is_run_again(tmp_path):
    write_trial(
        tmp_path, SweepTrial(layout="ep2", global_batch=8, time_s=1.0, tokens=2.0, tflops=3.0)
    )
    with (tmp_path / "trials.jsonl").open("a") as stream:
        stream.write('{"layout": "ep')
    assert [trial.layout for trial in read_trials(tmp_path)] == ["ep2"]
    write_trial(tmp_path, SweepTrial(layout="ep1", global_batch=8))
    assert [trial.layout for trial in read_trials(tmp_path)] == ["ep2", "ep1"]
