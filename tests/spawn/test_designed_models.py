"""Designed shapes as models: their config.json, their training by the engine, and a ladder of them.

The ladder is of tiny shapes, in proportion to a tiny model: the widths of a design follow it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import tiny_jobs
from moewright.api.design_question import fit_own_level
from moewright.codec import read_run
from moewright.cost.loss_laws import describe_shape, find_law
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.intake.hf import build_config, read_config
from moewright.search.design import DesignGoal, ShapeAxes, list_shapes
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec

pytestmark = pytest.mark.spawn


def list_tiny_shapes(folder: Path) -> list[ModelSpec]:
    """Return designed shapes like a tiny model, smallest first, as their config.json is read."""
    base = replace(tiny_jobs.MODEL, max_position=512, dense_ffn_size=0)
    shapes = sorted(
        list_shapes(base, DesignGoal(tokens=1.0, most_total=6e6), ShapeAxes()),
        key=lambda shape: describe_shape(shape, 1.0).total,
    )
    models = []
    for number, shape in enumerate((shapes[0], shapes[-1])):
        path = folder / f"shape{number}" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(build_config(shape)))
        models.append(replace(read_config(path), name=shape.name))
        assert models[-1] == shape
    return models


@pytest.mark.thorough
def test_the_engine_trains_a_ladder_of_designed_shapes_and_a_law_is_fitted_to_it(
    data: DataSpec, tmp_path: Path
) -> None:
    law = find_law("joint")
    runs, distances = [], []
    for model in list_tiny_shapes(tmp_path):
        losses = []
        for steps in (4, 16, 64):
            workload = tiny_jobs.build_workload(data, steps=steps, eval_batches=4)
            plan = tiny_jobs.build_plan(workload, "ep2,mbs4", world_size=2, model=model)
            folder = tmp_path / f"{model.name}-{steps}"
            assert train(plan, folder) is ExitCode.DONE
            runs.append(folder)
            record = read_run(folder)
            losses.append(record.evals[-1].heldout_loss)
            shape = describe_shape(model, sum(step.tokens for step in record.steps))
            distances.append(losses[-1] - law.predict(shape))
        # As every law says, more tokens of a shape give a lower loss.
        assert all(longer < shorter for shorter, longer in pairwise(losses))
    level = fit_own_level(runs)
    assert level == pytest.approx(sum(distances) / len(distances))
    # The level is that of this corpus and vocabulary; it does not depend on one rung.
    for left_out in range(len(runs)):
        rest = [run for place, run in enumerate(runs) if place != left_out]
        assert fit_own_level(rest) == pytest.approx(level, abs=0.2 * abs(level))
