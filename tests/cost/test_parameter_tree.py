"""Buckets of many ranks at once are the buckets that are planned rank by rank."""

from __future__ import annotations

import pytest

from moewright.codec import parse_layout
from moewright.cost.memory.model_states import LINEAR_MODULES, stage_bucket_sets, state_rows
from moewright.cost.memory.parameter_tree import BucketFill, ParameterTree, local_params
from moewright.intake import catalogue
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.shapes import fsdp, shards
from moewright.spec.ledger import Component
from moewright.spec.workload import Workload

WORK = Workload(seq_len=4096, global_batch=512)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("Qwen3-30B-A3B", "tp2,ep8,pp4,vpp2"),
        ("DeepSeek-V3", "tp2,ep8,pp4,layout='Et*15|(t*16|)*2t*14mL',zero3"),
        ("DeepSeek-V3", "ep8,pp4,vpp2,layout='Et*8|(t*8|)*5t*13m|L'"),
        ("Qwen3-0.6B", "tp2,pp4,zero0"),
        ("gpt-oss-120b", "ep8,pp4,zero3"),
    ],
)
def test_buckets_of_a_tree_are_those_of_a_plan(model: str, text: str) -> None:
    spec, layout = catalogue.model(model), parse_layout(text, world_size=64)
    tree = ParameterTree()
    sequences = [tree.rank_sequences(spec, layout, pp_rank) for pp_rank in range(layout.pp)]
    planned = stage_bucket_sets(Job(model=spec, workload=WORK, layout=layout))
    for group in shards.GRADIENT_GROUPS:
        fill = BucketFill(
            tree,
            lambda params, group=group: local_params(
                params, layout, group, lambda param: param.module in LINEAR_MODULES
            ),
            shard_multiple=1,
            bucket_elements=WORK.optimizer.bucket_elements,
            follows_marked=True,
        )
        size = grid.group_size(layout, fsdp.state_group(layout, group))
        totals = fill.totals(size if layout.zero else 1)
        for held, sets in zip(sequences, planned, strict=True):
            nodes = list(held.nodes)
            own = [bucket_set for bucket_set in sets if bucket_set.group == group]
            assert totals.numel[nodes].sum() == sum(bucket_set.numel for bucket_set in own)
            assert totals.calls[nodes].sum() == sum(len(bucket_set.buckets) for bucket_set in own)
            weights = sum(
                row.bytes
                for row in state_rows(WORK, layout, own)
                if row.component is Component.WEIGHTS and row.module in LINEAR_MODULES
            )
            linear = totals.own_marked if layout.zero == 3 else totals.marked
            assert 2 * linear[nodes].sum() == weights
