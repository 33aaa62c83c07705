"""Designs: the front, bounds, serving, files that the planner and transformers read, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import moewright as mw
import sample_run
from moewright.api.design_document import build_design_document, build_design_view
from moewright.api.design_question import fit_own_level
from moewright.api.designing import Design
from moewright.api.requests import read_plan_request
from moewright.cli.main import main
from moewright.codec import format_layout, parse_layout
from moewright.cost.loss_laws import describe_shape, find_law, find_reference
from moewright.intake.hf import read_config
from moewright.report import console
from moewright.report.document_text import print_document
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.search.search import find_best_plan
from moewright.spec.options import WorkloadOptions
from moewright.view.design_view import ShapeRole

pytestmark = pytest.mark.slow  # what its tests share takes seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("design")


@pytest.fixture(scope="module")
def answer(folder: Path) -> Design:
    return mw.design(on="8xH100", days=7, max_total="3B", serve="1xH100", out=folder)


def test_every_shape_is_within_its_bounds_and_sees_what_its_speed_allows(answer: Design) -> None:
    assert answer.timed >= 3
    for shape in answer.front:
        assert shape.active < shape.total <= 3e9
        assert shape.days == pytest.approx(7)
        seconds = 7 * 86400 * answer.options.goodput
        assert shape.tokens == pytest.approx(shape.tokens_per_s * seconds)
        assert shape.prediction.low < shape.prediction.loss < shape.prediction.high


def test_no_shape_of_the_front_beats_another_in_everything(answer: Design) -> None:
    keys = [
        (shape.prediction.loss, shape.total, shape.active, shape.serving_bytes)
        for shape in answer.front
    ]
    for mine in keys:
        for other in keys:
            assert mine == other or any(m < o for m, o in zip(mine, other, strict=True))
    assert keys == sorted(keys)


def test_every_shape_has_the_layout_and_the_speed_of_its_full_plan(answer: Design) -> None:
    request = answer.request
    assert answer.like is not None
    assert answer.plan.model == answer.chosen.model
    for shape in (answer.chosen, answer.front[-1], answer.like):
        plan = find_best_plan(shape.model, request.workload, request.hardware)
        assert plan is not None
        assert plan.estimate.fit_probability >= 0.9
        assert shape.layout == format_layout(plan.layout)
        rate = plan.workload.tokens_per_step / plan.estimate.step_s
        assert shape.tokens_per_s == pytest.approx(rate)
    assert len(answer.front) <= answer.planned <= answer.timed
    # The best of the front has the least loss of all that were planned, not of templates.
    assert answer.chosen.prediction.loss == min(s.prediction.loss for s in answer.front)


def test_a_terminal_of_80_columns_shows_the_front_as_a_table(
    answer: Design, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PIPED_WIDTH", 80)
    stream = io.StringIO()
    print_document(console.make_console(stream), build_design_document(answer))
    heads = ["shape", "total", "active", "tokens", "loss", "interval", "serving"]
    (head,) = [line for line in stream.getvalue().splitlines() if line.split() == heads]
    assert len(head) <= 80


def test_what_is_served_fits_where_it_has_to(answer: Design) -> None:
    assert answer.serving.devices == 1
    assert answer.serving.memory_bytes < 0.9 * 80e9
    assert answer.serving.weight_bytes == 2 * answer.chosen.total


def test_published_models_of_the_size_stand_beside_the_chosen_shape(answer: Design) -> None:
    view = build_design_view(answer)
    roles = [point.role for point in view.points]
    assert roles.count(ShapeRole.CHOSEN) == 1
    assert roles.count(ShapeRole.FRONT) == len(answer.front) - 1
    for shape in answer.published:
        assert answer.chosen.total / 2 <= shape.total <= answer.chosen.total * 2
        assert shape.tokens == pytest.approx(shape.tokens_per_s * shape.days * 86400 * 0.95)
        assert shape.model.name in {point.name for point in view.points}


def test_the_planner_reads_the_files(answer: Design, folder: Path) -> None:
    model = read_config(folder)
    assert model.hidden_size == answer.chosen.model.hidden_size
    assert model.moe == answer.chosen.model.moe
    request = read_plan_request(folder / "job.toml", "", WorkloadOptions())
    assert request.model.layers == answer.chosen.model.layers
    assert request.hardware.count == 8
    # The engine runs the layout that the job states, and that of plan.json may need a library.
    if request.layout_text:
        layout = parse_layout(request.layout_text, world_size=8)
        assert not any(unsupported_layout(request.job(layout)))
    else:
        plan = answer.plan
        assert any(unsupported_layout(plan_job(plan)))
    assert json.loads((folder / "plan.json").read_text())["fingerprint"] == answer.plan.fingerprint


def test_transformers_loads_the_config(answer: Design, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.num_experts == answer.chosen.model.moe.experts  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choices", "rule"),
    [
        ({}, "--days.*--tokens"),
        ({"days": 3.0, "until": 2.0}, "--days.*--until"),
        ({"until": -1.0}, "--until.*above 0"),
        ({"days": 3.0, "served_tokens": "many"}, "--served-tokens"),
        ({"days": 3.0, "tokens": "1T"}, "--days.*--tokens"),
        ({"days": -1.0}, "--days.*above 0"),
        ({"days": 3.0, "goodput": 1.5}, "--goodput"),
        ({"days": 3.0, "max_total": "lots"}, "--max-total"),
        ({"days": 3.0, "max_total": "1M"}, "no shape is within"),
        ({"days": 3.0, "batch": 0}, "--batch"),
        ({"days": 3.0, "like": "Llama-3.1-8B"}, "--like|model"),
    ],
)
def test_goals_that_cannot_be_are_refused(choices: dict[str, Any], rule: str) -> None:
    with pytest.raises(mw.BadInput, match=rule):
        mw.design(on="8xH100", **choices)


def test_own_runs_set_the_level_of_losses(tmp_path: Path) -> None:
    run = sample_run.record()
    sample_run.write_run(tmp_path, run)
    last = run.evals[-1]
    tokens = 4096 * last.step
    law = find_law("joint").predict(describe_shape(run.plan.model, tokens))
    assert fit_own_level((tmp_path,)) == pytest.approx(last.heldout_loss - law)


def test_a_folder_that_is_no_run_sets_no_level(tmp_path: Path) -> None:
    with pytest.raises(mw.BadInput):
        fit_own_level((tmp_path,))
    assert fit_own_level(()) == 0.0


@pytest.mark.thorough
def test_every_shape_trains_to_the_loss_and_the_first_that_has_it_is_chosen() -> None:
    answer = mw.design(on="8xH100", until=2.3, max_total="2.6B", served_tokens="1T")
    for shape in answer.front:
        assert shape.prediction.loss == pytest.approx(2.3, abs=1e-4)
        seconds = shape.days * 86400 * answer.options.goodput
        assert shape.tokens == pytest.approx(shape.tokens_per_s * seconds)
    lives = [shape.life_hours for shape in answer.front]
    assert answer.chosen.life_hours == min(lives)
    serving = answer.serving
    decoding_h = 1e12 / serving.tokens_per_s * serving.devices / 3600
    training_h = answer.chosen.days * 24 * 8
    assert answer.chosen.life_hours == pytest.approx(training_h + decoding_h)
    assert answer.chosen.serving_bytes == serving.memory_bytes
    # More tokens of the same shape have a lower loss, by every law.
    longer = mw.design(on="8xH100", until=2.25, max_total="2.2B")
    by_name = {shape.model.name: shape for shape in answer.front}
    both = [shape for shape in longer.front if shape.model.name in by_name]
    assert both
    assert all(by_name[shape.model.name].tokens < shape.tokens for shape in both)


def test_a_loss_that_no_tokens_give_is_refused_with_the_least() -> None:
    with pytest.raises(
        mw.BadInput, match=r"--until=0.5.*never.*nearest legal value: 1\."
    ) as refusal:
        mw.design(on="8xH100", until=0.5)
    least = float(str(refusal.value).rsplit(" ", 1)[1])
    shape = describe_shape(mw.model("Qwen3-30B-A3B"), 1.0)
    reached = find_reference(shape, least)
    assert reached is not None
    assert reached.tokens > 1e13
    assert find_law("joint").predict(reached) == pytest.approx(least, abs=1e-4)


def test_the_verb_prints_the_front_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "design.json"
    goal = ["--on", "8xH100", "--tokens", "100B", "--max-total", "1.1B", "--goodput", "0.9"]
    assert main(["design", *goal, "--json", str(path), "-v"]) == 0
    output = capsys.readouterr().out
    data = json.loads(path.read_text())
    assert data["chosen"]["model"]["name"] in output
    assert f"{data['chosen']['prediction']['loss']:.3f}" in output
    assert "2507.17702" in output
    for shape in data["front"]:
        assert shape["tokens"] == 100e9
        seconds = shape["days"] * 86400 * 0.9
        assert seconds == pytest.approx(100e9 / shape["tokens_per_s"])
    assert main(["design", "--on", "8xH100"]) == 2
