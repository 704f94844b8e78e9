"""Parity is equivalence within a tolerance: what is measured too loosely does not pass."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from forksync.parity import Tolerance, curves, numbers, student


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [(0.95, 1, 6.3138), (0.95, 5, 2.0150), (0.975, 10, 2.2281), (0.95, 2.5, 2.5582), (0.95, 1000, 1.6464)],
)
def test_students_quantiles_are_those_of_the_tables(probability: float, freedom: float, quantile: float) -> None:
    assert student(probability, freedom) == pytest.approx(quantile, abs=1e-4)


@pytest.mark.parametrize(
    ("fork", "reference", "tolerance", "passed"),
    [
        ([1.0], [1.0], {}, True),
        ([1.04], [1.0], {"absolute": 0.05}, True),
        ([1.06], [1.0], {"absolute": 0.05}, False),
        ([104.0], [100.0], {"relative": 0.05}, True),
        ([0.5], [1.0], {"absolute": 0.05, "better": "lower"}, True),
        ([1.5], [1.0], {"absolute": 0.05, "better": "lower"}, False),
        ([1.5], [1.0], {"absolute": 0.05, "better": "higher"}, True),
        ([math.nan], [1.0], {"absolute": 9}, False),
        ([], [1.0], {"absolute": 9}, False),
        ([1.0, 1.01, 0.99, 1.0], [1.0, 1.01, 0.99, 1.0], {"absolute": 0.05}, True),
        ([1.0, 1.5, 0.5], [1.0, 1.5, 0.5], {"absolute": 0.05}, False),
    ],
)
def test_numbers(fork: list[float], reference: list[float], tolerance: dict[str, float | str], passed: bool) -> None:
    one = numbers("loss", fork, reference, Tolerance.model_validate(tolerance))
    assert one.passed is passed, one.said


def test_noise_that_hides_the_answer_is_said_to_be_noise() -> None:
    said = numbers("loss", [1.0, 1.5, 0.5], [1.0, 1.5, 0.5], Tolerance(absolute=0.05)).said
    assert "more runs" in said


def test_a_true_difference_at_the_tolerance_passes_no_more_often_than_one_time_in_twenty() -> None:
    draw = random.Random(0)
    passed = 0
    for _ in range(1000):
        fork = [draw.gauss(0.1, 0.05) for _ in range(5)]
        passed += numbers("x", fork, [draw.gauss(0.0, 0.05) for _ in range(5)], Tolerance(absolute=0.1)).passed
    assert passed <= 70


def course(seed: int, rate: float, noise: float, steps: int = 60) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(float(step), 1 - math.exp(-rate * step) + draw.gauss(0, noise)) for step in range(steps)]


def test_curves_with_the_same_course_agree_though_no_point_does() -> None:
    fork, reference = [course(n, 0.1, 0.05) for n in (1, 2, 3)], [course(n, 0.1, 0.05) for n in (4, 5, 6)]
    one = curves("reward", fork, reference, Tolerance(absolute=0.02, smooth=5))
    assert one.passed, one.said


def test_a_slower_curve_leaves_the_band() -> None:
    fork, reference = [course(n, 0.04, 0.05) for n in (1, 2, 3)], [course(n, 0.1, 0.05) for n in (4, 5, 6)]
    one = curves("reward", fork, reference, Tolerance(absolute=0.02, smooth=5))
    assert not one.passed
    assert "outside from step" in one.said


def test_a_faster_curve_is_no_fault_where_higher_is_better() -> None:
    fork, reference = [course(1, 0.3, 0.0)], [course(2, 0.1, 0.0)]
    assert not curves("reward", fork, reference, Tolerance(absolute=0.02)).passed
    assert curves("reward", fork, reference, Tolerance(absolute=0.02, better="higher")).passed


def test_a_single_run_is_compared_by_its_own_noise() -> None:
    one = curves("reward", [course(1, 0.1, 0.05)], [course(2, 0.1, 0.05)], Tolerance(absolute=0.03, smooth=7))
    assert one.passed, one.said


def test_a_curve_that_ends_early_does_not_pass() -> None:
    one = curves("reward", [course(1, 0.1, 0.0)[:50]], [course(2, 0.1, 0.0)], Tolerance(absolute=1))
    assert not one.passed
    assert "no value at 10 steps" in one.said


def test_the_last_values_are_told() -> None:
    one = curves("x", [[(0, 1.0), (1, 3.0)]], [[(0, 1.0), (1, 2.0)], [(0, 1.0), (1, 4.0)]], Tolerance(absolute=5))
    assert (one.fork, one.reference) == (3.0, fmean([2.0, 4.0]))
