"""What a pick from many deceives by, and ties."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest

from moewright.cost.constants import Constants
from moewright.cost.evidence import JOIN, error_covariance, expected_optimism, find_simplest
from moewright.intake import catalogue

NOISE = 0.1


def test_two_alike_that_err_apart_deceive_by_the_mean_of_the_larger_of_two_normals() -> None:
    optimism = expected_optimism([1.0, 1.0], NOISE**2 * np.eye(2))
    assert optimism == pytest.approx(NOISE / sqrt(pi), rel=0.06)  # 2,048 draws


def test_what_errs_alike_or_stands_alone_does_not_deceive() -> None:
    assert expected_optimism([3.0], NOISE**2 * np.eye(1)) == pytest.approx(0.0, abs=1e-12)
    alike = np.full((3, 3), NOISE**2)
    assert expected_optimism([1.0, 1.1, 1.2], alike) == pytest.approx(0.0, abs=1e-12)


def test_more_near_ties_deceive_more_and_distant_ones_do_not() -> None:
    sizes = [expected_optimism([1.0] * count, NOISE**2 * np.eye(count)) for count in (2, 5, 20)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    far = expected_optimism([1.0, *[3.0] * 19], NOISE**2 * np.eye(20))
    assert far < 0.01 * sizes[0]


def test_errors_are_corrected_on_average() -> None:
    """Draw true steps around predictions, pick, and compare: what is left is noise alone."""
    draws = np.random.default_rng(7)
    choices = [["tp"], ["tp", "pp"], ["pp", "vpp", "recompute=full"], ["ep"]]
    missing = [(), ("offload=a",), ("offload=a", f"tp{JOIN}pp"), ()]
    covariance = error_covariance(choices, missing, Constants(catalogue.hardware("8xH100")))
    true = np.log([1.0, 1.02, 0.99, 1.05])
    biases = []
    for errors in draws.multivariate_normal(np.zeros(4), covariance, size=400):
        predicted = true + errors
        pick = int(predicted.argmin())
        expected = predicted[pick] + expected_optimism(np.exp(predicted), covariance)
        biases.append(((predicted - true)[pick], expected - true[pick]))
    uncorrected, corrected = np.mean(biases, axis=0)
    assert uncorrected < -0.02
    assert abs(corrected) < abs(uncorrected) / 2


def test_a_tie_goes_to_the_simpler_layout_and_a_real_gain_does_not() -> None:
    choices = [["tp", "pp", "vpp"], ["tp"]]
    assert find_simplest([1.0, 1.006], choices, burdens=[3, 1]) == 1
    assert find_simplest([1.0, 1.1], choices, burdens=[3, 1]) == 0
    assert find_simplest([1.0, 1.006], choices, burdens=[1, 3]) == 0
    assert find_simplest([1.0, 1.0001], [["tp"], ["tp"]], burdens=[1, 0]) == 0  # nothing differs
