"""Loss laws: the tables and optima that their papers print, the dense limit, levels, ranges."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from moewright.cost.loss_laws import (
    Shape,
    describe_shape,
    efficiency_leverage,
    find_law,
    fit_level,
    joint_coefficients,
    predict_losses,
    read_laws,
)
from moewright.intake import catalogue

SHAPE = Shape(
    total=4e9,
    active=1e9,
    tokens=5e10,
    expansion=8.0,
    granularity=4.0,
    leverage_granularity=3.0,
    active_experts=4.0,
    shared_share=0.0,
)


@pytest.mark.parametrize(
    ("experts", "printed"),
    [
        (1, (30.3640, -0.1817, 53.9838, -0.1965)),
        (2, (27.7982, -0.1780, 66.8401, -0.2065)),
        (4, (24.8462, -0.1731, 87.7022, -0.2192)),
        (8, (21.8330, -0.1676, 119.9126, -0.2338)),
        (16, (19.0159, -0.1617, 167.5073, -0.2494)),
        (32, (16.5424, -0.1557, 234.6726, -0.2652)),
    ],
)
def test_the_joint_law_has_the_coefficients_of_its_table_4(
    experts: int, printed: tuple[float, ...]
) -> None:
    """Table 3 prints four digits, of which table 4 follows to three."""
    computed = joint_coefficients(find_law("joint"), experts)
    assert computed == pytest.approx(printed, rel=3e-3)


@pytest.mark.parametrize(
    ("flops", "experts", "active", "tokens"),
    [
        (1e20, 1, 1.7e9, 9.7e9),
        (1e20, 8, 990e6, 17e9),
        (1e20, 32, 669e6, 24.9e9),
        (1e21, 4, 4.4e9, 38e9),
        (1e22, 1, 18.8e9, 88.6e9),
        (1e22, 32, 12.2e9, 136.9e9),
    ],
)
def test_the_joint_law_has_the_optima_of_its_table_1(
    flops: float, experts: int, active: float, tokens: float
) -> None:
    m, mu, n, nu = joint_coefficients(find_law("joint"), experts)
    # The optimum of m N^mu + n D^nu under 6 N D = C.
    scale = (mu * m / (nu * n)) ** (-1 / (mu + nu))
    best = scale * (flops / 6) ** (nu / (mu + nu))
    assert best == pytest.approx(active, rel=0.02)
    assert flops / 6 / best == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize(
    ("size", "tokens", "granularity", "loss"),
    [
        (1e8, 4.37e9, 8, 3.133),
        (1e9, 28.94e9, 16, 2.491),
        (3e9, 72.90e9, 16, 2.245),
        (7e9, 137.60e9, 32, 2.076),
        (70e9, 941.07e9, 32, 1.694),
        (300e9, 2.96e12, 64, 1.503),
        (1e12, 7.94e12, 64, 1.367),
    ],
)
def test_the_fine_grained_law_has_the_losses_of_its_table_2(
    size: float, tokens: float, granularity: float, loss: float
) -> None:
    """The table writes sizes as 64 x dense; layers of 12 d^2 then have (8 x 64 + 4) d^2.

    Coefficients are printed with three digits: losses follow to the error of the fit.
    """
    shape = replace(SHAPE, total=size * 516 / 12, tokens=tokens, granularity=granularity)
    assert find_law("fine-grained").predict(shape) == pytest.approx(loss, abs=0.025)


def test_efficiency_leverage_is_over_7_where_its_paper_says_and_best_at_12() -> None:
    values = find_law("leverage").coefficients
    assert 7 < efficiency_leverage(values, 0.031, 12, 1e22) < 7.5
    finer = range(2, 33)
    best = max(finer, key=lambda granularity: efficiency_leverage(values, 0.031, granularity, 1e22))
    assert best in (11, 12)
    # Without sparsity there is none to gain.
    assert efficiency_leverage(values, 1.0, 2, 1e20) == pytest.approx(1.0, abs=0.01)
    # More compute and fewer active experts gain more.
    assert efficiency_leverage(values, 0.031, 12, 1e20) < 7
    assert efficiency_leverage(values, 0.1, 12, 1e22) < 7


def test_the_law_of_five_factors_has_the_optima_of_its_paper() -> None:
    law = find_law("five factors")

    def best(name: str, values: list[float], **fixed: float) -> float:
        shapes = [replace(SHAPE, **{**fixed, name: value}) for value in values]
        return values[min(range(len(values)), key=lambda place: law.predict(shapes[place]))]

    assert best("active_experts", [float(n) for n in range(1, 20)]) == 7
    shares = [n / 100 for n in range(100)]
    assert best("shared_share", shares) == pytest.approx(0.31, abs=0.01)
    for total, printed in ((30e9, 0.40), (671e9, 0.22)):
        active = [total * share for share in shares[1:]]
        optimum = best("active", active, total=total, active_experts=7.0, shared_share=0.31)
        assert optimum / total == pytest.approx(printed, abs=0.011)


def test_the_dense_law_has_chinchilla_s_twenty_tokens_a_parameter() -> None:
    law = find_law("dense")
    flops = 5.76e23  # of Chinchilla itself, 70B on 1.4T
    sizes = [10 ** (9 + place / 200) for place in range(500)]
    best = min(
        sizes,
        key=lambda size: law.predict(replace(SHAPE, active=size, tokens=flops / 6 / size)),
    )
    assert best == pytest.approx(70e9, rel=0.15)
    assert flops / 6 / best**2 == pytest.approx(20, rel=0.3)


def test_the_joint_law_without_experts_is_near_the_slope_of_the_dense_law() -> None:
    """The levels are of other corpora: the gain by ten times the compute is compared."""
    joint, dense = find_law("joint"), find_law("dense")
    small = replace(SHAPE, expansion=1.0, active=4e8, total=4e8, tokens=8e9)
    large = replace(small, active=4e9, total=4e9, tokens=8e10)
    gains = [law.predict(small) - law.predict(large) for law in (joint, dense)]
    assert gains[0] == pytest.approx(gains[1], rel=0.35)


@pytest.mark.parametrize("law", [law.name for law in read_laws()])
def test_more_tokens_and_more_parameters_never_raise_a_loss(law: str) -> None:
    predict = find_law(law).predict
    assert predict(replace(SHAPE, tokens=2 * SHAPE.tokens)) < predict(SHAPE)
    larger = replace(SHAPE, total=2 * SHAPE.total, active=2 * SHAPE.active)
    assert predict(larger) < predict(SHAPE)


def test_laws_say_what_lies_outside_their_runs() -> None:
    assert find_law("joint").list_outside(SHAPE) == []
    assert find_law("joint").list_outside(replace(SHAPE, tokens=1e13)) == ["tokens"]
    assert "expansion" in find_law("fine-grained").list_outside(SHAPE)


def test_a_shape_is_read_from_a_model() -> None:
    shape = describe_shape(catalogue.model("Qwen3-30B-A3B"), 1e12)
    assert shape.total == pytest.approx(30.5e9, rel=0.01)
    assert shape.active == pytest.approx(3.35e9, rel=0.01)
    assert shape.expansion == 16
    assert shape.leverage_granularity == pytest.approx(2 * 2048 / 768)
    assert shape.active_experts == 8


def test_own_runs_move_the_level_and_no_order() -> None:
    law = find_law("joint")
    runs = [replace(SHAPE, tokens=tokens) for tokens in (1e9, 1e10)]
    level = fit_level((run, law.predict(run) + 0.7) for run in runs)
    assert level == pytest.approx(0.7)
    shapes = [SHAPE, replace(SHAPE, total=8e9, expansion=16.0)]
    plain = predict_losses(shapes, SHAPE)
    moved = predict_losses(shapes, SHAPE, level)
    assert [m.loss - p.loss for m, p in zip(moved, plain, strict=True)] == pytest.approx([0.7] * 2)


def test_the_reference_has_the_loss_of_the_level_s_law_and_the_laws_span_the_interval() -> None:
    other = replace(SHAPE, active=2e9, total=8e9)
    same, changed = predict_losses([SHAPE, other], SHAPE)
    assert same.loss == pytest.approx(find_law("joint").predict(SHAPE))
    assert same.high - same.low == pytest.approx(2 * find_law("joint").error)
    losses = [loss for _, loss in changed.by_law]
    assert changed.low < min(losses) < changed.loss < max(losses) < changed.high
    assert log(same.loss / changed.loss) > 0


def test_finer_experts_gain_as_olmoe_measured() -> None:
    """8, 32, 64 experts with 1, 4, 8 chosen at equal parameters (arXiv 2409.02060, 4.1.2)."""
    olmoe = catalogue.model("OLMoE-1B-7B-0924")
    assert olmoe.moe is not None
    shapes = [
        describe_shape(
            replace(
                olmoe,
                moe=replace(
                    olmoe.moe,
                    experts=experts,
                    ffn_size=65536 // experts,
                    router=replace(olmoe.moe.router, top_k=experts // 8),
                ),
            ),
            1.3e11,
        )
        for experts in (8, 32, 64)
    ]
    for name in ("fine-grained", "leverage", "five factors"):
        coarse, middle, fine = map(find_law(name).predict, shapes)
        assert coarse > middle > fine
        assert coarse - middle > middle - fine
