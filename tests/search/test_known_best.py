"""What a screening notes on its way is what a search of its own would find."""

from __future__ import annotations

from math import inf

import pytest

from moewright.intake import catalogue
from moewright.search.candidates import CandidatePool
from moewright.search.ranking import ProvenChoices
from moewright.search.screening import Screener
from moewright.search.space import SearchSpace, build_search_space
from moewright.spec.workload import Workload

WORK = Workload(seq_len=4096, global_batch=128)
JOBS = (("OLMoE-1B-7B-0924", "8xH100"), ("Llama-3.1-8B", "16xB200"), ("Qwen3-30B-A3B", "16xH200"))


def space_on(model: str, devices: str) -> SearchSpace:
    return build_search_space(catalogue.model(model), WORK, catalogue.hardware(devices), "")


@pytest.mark.parametrize(("model", "devices"), JOBS)
def test_what_is_noted_on_the_way_is_what_a_search_for_it_finds(model: str, devices: str) -> None:
    space = space_on(model, devices)
    screener = Screener(space)
    wish = ProvenChoices(space, screener).wish()
    pool = CandidatePool(space, screener, keep=18, wish=wish)
    pool.screen_all()
    best_s = pool.ranked()[0].bound_s
    for share in (0.5, 1.0, 1.1, 3.0, inf):
        (sought,) = pool.find_each([wish], below_s=share * best_s)
        assert pool.find_wished(below_s=share * best_s) == sought
