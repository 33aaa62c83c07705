"""The fewest devices on which a layout fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.intake import catalogue
from moewright.search.ranking import is_safe
from moewright.search.search import search
from moewright.search.what_if import find_fewest, list_device_counts
from moewright.spec.plan import RankingRule
from moewright.spec.workload import Routing, Workload

WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64)


def test_counts_are_parts_of_a_node_then_whole_nodes() -> None:
    assert list(list_device_counts(catalogue.hardware("32xH100"))) == [1, 2, 4, 8, 16, 24, 32]
    assert list(list_device_counts(catalogue.hardware("3xH100"))) == [1, 2, 3]


@pytest.mark.parametrize("name", ["OLMoE-1B-7B-0924", "Qwen3-8B"])
def test_the_fewest_devices_are_those_of_brute_force(name: str) -> None:
    model, hardware = catalogue.model(name), catalogue.hardware("8xA100")
    rule = RankingRule()
    safe_counts = []
    for count in list_device_counts(hardware):
        plans = search(model, WORK, replace(hardware, count=count), top=1, rule=rule).plans
        if plans and is_safe(plans[0].estimate, rule):
            safe_counts.append(count)
    fewest = find_fewest(model, WORK, hardware, rule=rule)
    assert fewest is not None
    assert fewest.count == min(safe_counts)


def test_a_model_too_large_for_all_has_no_fewest() -> None:
    assert find_fewest(catalogue.model("Kimi-K2"), WORK, catalogue.hardware("8xH100")) is None
