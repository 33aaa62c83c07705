"""The best plan alone is the first plan of a whole search, though most of the space is not scored.

Jobs are drawn at random: models, devices, batches, context, precision and pinned choices.
"""

from __future__ import annotations

import random

import pytest

from moewright.intake import catalogue
from moewright.search.ranking import is_safe
from moewright.search.search import find_best_plan, search
from moewright.spec.errors import BadInput
from moewright.spec.plan import DEFAULT_RULE
from moewright.spec.workload import Dtype, Workload

MODELS = (
    "OLMoE-1B-7B-0924",
    "Qwen3-30B-A3B",
    "Mixtral-8x7B",
    "DeepSeek-V2-Lite",
    "GLM-4.5-Air",
    "Qwen3-235B-A22B",
    "Llama-3.1-8B",
    "DeepSeek-V3",
)
DEVICES = ("H100", "H200", "B200", "A100-80G", "MI300X", "H800")
FIXED = ("", "", "", "pp1", "tp2", "recompute=full", "zero3", "mbs1", "overlap=none", "vpp2,pp4")


def check_draw(seed: int) -> bool:
    """Return whether a drawn job has a plan at all."""
    rng = random.Random(seed)
    model = catalogue.model(rng.choice(MODELS))
    hardware = catalogue.hardware(
        f"{rng.choice((4, 8, 16, 32, 64, 96, 128))}x{rng.choice(DEVICES)}"
    )
    workload = Workload(
        seq_len=rng.choice((2048, 4096, 8192)),
        global_batch=rng.choice((128, 192, 512, 1024)),
        precision=rng.choice((Dtype.BF16, Dtype.BF16, Dtype.FP8)),
    )
    fixed = rng.choice(FIXED)
    try:
        plan = find_best_plan(model, workload, hardware, fixed=fixed)
    except BadInput:
        return False
    first = next(iter(search(model, workload, hardware, fixed=fixed, top=1).plans), None)
    if first is not None and not is_safe(first.estimate, DEFAULT_RULE):
        first = None
    assert plan == first, (model.name, hardware.name, hardware.count, workload.global_batch, fixed)
    return plan is not None


@pytest.mark.parametrize("seed", range(3))
def test_the_best_plan_alone_is_the_first_of_a_whole_search(seed: int) -> None:
    check_draw(seed)


@pytest.mark.thorough
def test_the_best_plan_alone_is_the_first_of_many_searches() -> None:
    plans = [check_draw(seed) for seed in range(100, 160)]
    assert sum(plans) > 20
