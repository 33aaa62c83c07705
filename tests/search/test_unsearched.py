"""What lies outside of a search, beside what a search goes through."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from moewright.intake import catalogue
from moewright.search.explain import explain_objections
from moewright.search.space import (
    activation_policies,
    build_search_space,
    degree_groups,
    state_policies,
    with_pipeline,
)
from moewright.search.unsearched import SearchedChoices
from moewright.spec.record import copy_with
from moewright.spec.workload import Workload


@pytest.mark.parametrize("model", ["DeepSeek-V3", "Qwen3-30B-A3B", "Meta-Llama-3-8B"])
def test_nothing_that_a_search_goes_through_is_called_unsearched(model: str) -> None:
    generator = random.Random(model)
    space = build_search_space(
        catalogue.model(model),
        Workload(seq_len=8192, global_batch=768),
        catalogue.hardware("64xH100"),
        "",
    )
    choices = SearchedChoices(space=space)
    policies, states = activation_policies(space), state_policies(space)
    for group in generator.sample(list(islice(degree_groups(space), 400)), 40):
        shape = generator.choice(group.pipelines.shapes)
        policy, state = generator.choice(policies), generator.choice(states)
        layout = copy_with(
            policy.apply_to(with_pipeline(group.layout, shape, space)),
            zero=state.zero,
            offload=tuple(sorted({*policy.offload, *state.offload})),
        )
        assert choices.find_unsearched(layout) == ()


def test_an_objection_says_that_no_search_would_have_tried_the_layout() -> None:
    job = (
        catalogue.model("Qwen3-30B-A3B"),
        Workload(seq_len=4096, global_batch=640),
        catalogue.hardware("16xH100"),
    )
    lines = explain_objections(*job, _Nothing(), "ep8,mbs5,recompute=full")
    assert any("no search tries" in line and "mbs" in line for line in lines)
    tried = explain_objections(*job, _Nothing(), "ep8,mbs4,recompute=full")
    assert not any("no search tries" in line for line in tried)


class _Nothing:
    """A search that came back empty."""

    plans = ()
