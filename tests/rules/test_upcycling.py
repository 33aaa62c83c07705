"""Upcycling on paper: the model that comes out, the factors, and what is refused."""

from dataclasses import replace

import pytest

import tiny_jobs
from moewright.rules.shapes.parameters import parameters
from moewright.rules.upcycling import upcycle_model
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec
from moewright.spec.upcycling import RouterWeighting, UpcyclingScaling, UpcyclingSpec

DENSE = tiny_jobs.DENSE  # 3 layers, MLP width 48


def test_a_model_keeps_all_but_its_mlps() -> None:
    model = upcycle_model(DENSE, UpcyclingSpec(experts=12, top_k=3, granularity=3, dense_first=1))
    assert model.moe is not None
    assert (model.moe.experts, model.moe.ffn_size, model.moe.router.top_k) == (12, 16, 3)
    assert model.moe_layers == (False, True, True)
    assert (model.family, model.dense_ffn_size) == ("qwen3_moe", 48)
    shapes = {param.name: param.shape for param in parameters(model)}
    dense_shapes = {param.name: param.shape for param in parameters(DENSE)}
    unchanged = {name for name, shape in shapes.items() if shape == dense_shapes.get(name)}
    assert unchanged == {
        name for name in dense_shapes if ".mlp." not in name or name.startswith("layers.0.")
    }
    assert shapes["layers.1.moe.experts.gate_up.weight"] == (12, 2, 16, 32)
    assert shapes["layers.2.moe.experts.down.weight"] == (12, 32, 16)


def test_a_pattern_of_layers() -> None:
    deep = replace(DENSE, layers=7, moe_layers=(False,) * 7)
    model = upcycle_model(deep, UpcyclingSpec(experts=4, top_k=1, dense_first=1, every=2))
    assert model.moe_layers == (False, False, True, False, True, False, True)
    assert upcycle_model(deep, UpcyclingSpec(experts=4, top_k=1)).dense_ffn_size == 0


@pytest.mark.parametrize(
    ("choice", "up", "down"),
    [
        (UpcyclingSpec(experts=8, top_k=2), 1, 1),
        (UpcyclingSpec(experts=8, top_k=4, granularity=4), 1, 4),
        (
            UpcyclingSpec(experts=8, top_k=4, granularity=4, scaling=UpcyclingScaling.PUBLISHED),
            4 ** (1 / 3),
            4 ** (1 / 3),
        ),
        # R G^2 / k with R = E / G = 2 copies
        (
            UpcyclingSpec(
                experts=8,
                top_k=2,
                granularity=4,
                scaling=UpcyclingScaling.PUBLISHED,
                weighting=RouterWeighting.PRE_SOFTMAX,
            ),
            16 ** (1 / 3),
            16 ** (1 / 3),
        ),
    ],
)
def test_factors(choice: UpcyclingSpec, up: float, down: float) -> None:
    assert choice.weight_factors == pytest.approx((up, down))


@pytest.mark.parametrize(
    ("dense", "choice", "message"),
    [
        (
            tiny_jobs.MODEL,
            UpcyclingSpec(experts=8, top_k=2),
            "model=tiny-moe: has 8 experts already",
        ),
        (
            replace(DENSE, family="gpt2"),
            UpcyclingSpec(experts=8, top_k=2),
            "model=gpt2: is of a family without",
        ),
        (
            replace(DENSE, mlp_bias=True),
            UpcyclingSpec(experts=8, top_k=2),
            "model.mlp_bias=true: biases",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=0, top_k=2),
            "experts=0: must be at least 1; nearest legal value: 1",
        ),
        (DENSE, UpcyclingSpec(experts=8, top_k=0), "top_k=0: must be at least 1"),
        (
            DENSE,
            UpcyclingSpec(experts=10, top_k=5, granularity=5),
            "granularity=5: must divide the MLP's width 48; .* 4 or 6",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=10, top_k=4, granularity=4),
            "experts=10: must be a multiple of granularity 4.* 8",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=8, top_k=3, granularity=4),
            "top_k=3: must be a multiple of granularity 4.* 4",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=2, top_k=3),
            "top_k=3: must be at most experts 2; nearest legal value: 2",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=2, top_k=1, dense_first=3),
            "dense_first=3: leaves none of the 3 layers",
        ),
        (
            DENSE,
            UpcyclingSpec(experts=2, top_k=1, weighting=RouterWeighting.PRE_SOFTMAX),
            "router=pre-softmax: .* post-softmax",
        ),
    ],
)
def test_what_cannot_be_is_refused(dense: ModelSpec, choice: UpcyclingSpec, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        upcycle_model(dense, choice)
