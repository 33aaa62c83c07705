"""Training on a blend of corpora: any layout computes what one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_layouts_equal import assert_same_training

import tiny_jobs
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.workload import DocumentMasking

pytestmark = pytest.mark.spawn


@pytest.mark.thorough
def test_a_blend_trains_as_in_one_process(tmp_path: Path) -> None:
    first = tiny_jobs.write_corpus(tmp_path / "first")
    second = tiny_jobs.write_corpus(tmp_path / "second", documents=12, words=90)
    data = replace(
        first,
        train=f"0.7 {first.train} 0.3 {second.train}",
        heldout=f"1 {first.heldout} 2 {second.heldout}",
        documents=DocumentMasking.BOUNDED,
    )
    workload = tiny_jobs.build_workload(data, steps=3, eval_every_steps=3)
    workload = replace(workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=3))
    for name, layout, world_size in (("one", "", 1), ("cut", "ep2", 2)):
        plan = tiny_jobs.build_plan(workload, layout, world_size=world_size)
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")
