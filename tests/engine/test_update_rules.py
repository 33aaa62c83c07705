"""What an update does to the weights, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layout_proof import WORKLOAD, draw_test_weight
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, sgd_update
from moewright.engine.run.build_state import build_train_state
from moewright.rules.job import plan_job
from tiny_jobs import MODEL, build_plan

LR = 0.5


@pytest.mark.parametrize("update_rule", [adamw_update, sgd_update])
def test_without_gradients_matrices_decay_and_vectors_stay(update_rule: UpdateRule) -> None:
    work = replace(WORKLOAD, optimizer=replace(WORKLOAD.optimizer, weight_decay=0.1))
    no_data: Any = None
    optimizer = build_train_state(
        plan_job(build_plan(work, "", world_size=1, model=MODEL)),
        no_data,
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
        update_rule=update_rule,
    ).optimizer
    weights = [shard for shard in optimizer.local_shards() if "/" not in shard.name]
    before = [shard.tensor.clone() for shard in weights]
    optimizer.begin_step(1)
    optimizer.reduce_gradients()
    optimizer.update(lr=LR, scale=1.0)
    assert {len(shard.global_shape) > 1 for shard in weights} == {True, False}
    for shard, old in zip(weights, before, strict=True):
        factor = 1 - LR * 0.1 if len(shard.global_shape) > 1 else 1.0
        torch.testing.assert_close(shard.tensor, factor * old, msg=shard.name)
