import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.latency.regression import Features, Regression, non_negative

TRUE = (0.3, 0.7, 0.1)


def target(features: Features) -> float:
    return sum(map(float.__mul__, TRUE, features))


def trained(times: int = 300, noise: float = 0.0, every: int = 1) -> Regression:
    model, draw = Regression((1.0, 1.0, 1.0), 0.98, 0.1, every=every), random.Random(1)
    for _ in range(times):
        features = drawn(draw)
        model.observe(features, target(features) * draw.lognormvariate(0, noise), 0.05)
    return model


def drawn(draw: random.Random) -> Features:
    return (1.0, draw.uniform(0, 4), draw.uniform(0, 4))


def test_constants_are_recovered() -> None:
    assert trained().coefficients == pytest.approx(TRUE, rel=0.01)


def test_constants_are_recovered_from_noise_of_30_percent() -> None:
    assert trained(2000, noise=0.3).predict((1.0, 2.0, 2.0)) == pytest.approx(target((1.0, 2.0, 2.0)), rel=0.12)


def test_solving_periodically_gives_the_same_result() -> None:
    assert trained(every=8).coefficients == pytest.approx(trained().coefficients, rel=0.02)


def test_solved_observations_are_distinguished() -> None:
    model = Regression((1.0, 1.0, 1.0), 0.98, 0.1, every=8)
    solved = [model.observe((1.0, 1.0, 0.0), 1.0, 0.05) for _ in range(200)]
    assert all(solved[:4])
    assert sum(solved[:16]) >= 8
    assert sum(solved[-80:]) == 10


def test_a_few_outliers_have_little_weight() -> None:
    model, draw = trained(), random.Random(2)
    before = model.predict((1.0, 2.0, 2.0))
    for at in range(100):
        features = drawn(draw)
        model.observe(features, target(features) * (50.0 if at % 20 == 0 else 1.0), 0.05)
    assert model.predict((1.0, 2.0, 2.0)) == pytest.approx(before, rel=0.15)


def test_a_lasting_change_is_followed() -> None:
    model, draw = trained(), random.Random(2)
    for _ in range(150):
        features = drawn(draw)
        model.observe(features, 3 * target(features), 0.05)
    assert model.predict((1.0, 2.0, 2.0)) == pytest.approx(3 * target((1.0, 2.0, 2.0)), rel=0.1)


def test_without_observations_the_result_is_the_current_prior() -> None:
    prior = Regression((1.0, 1.0, 1.0), 0.98, 0.1)
    model = Regression(prior, 0.98, 10.0)
    assert not model.observed
    assert list(model.coefficients) == [1.0, 1.0, 1.0]
    prior.observe((1.0, 2.0, 3.0), 0.5, 0.05)
    assert model.coefficients == prior.coefficients


def test_a_prior_fills_the_gaps_of_a_few_observations() -> None:
    model = Regression(trained(), 0.98, 10.0)
    model.observe((1.0, 1.0, 1.0), target((1.0, 1.0, 1.0)), 0.05)
    assert model.predict((1.0, 4.0, 0.0)) == pytest.approx(target((1.0, 4.0, 0.0)), rel=0.05)


def test_of_two_explanations_the_one_without_shrinkage_is_chosen() -> None:
    model = Regression((0.0, 0.1, 0.0), 0.98, 0.1, shrink=(0.5, 0.0, 0.0))
    for _ in range(300):
        model.observe((1.0, 1.0, 0.0), 1.0, 0.05)
    fixed, each, _ = model.coefficients
    assert each > 5 * fixed


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1000)), max_size=60))
def test_no_coefficient_is_negative_or_infinite(seen: list[tuple[float, float, float]]) -> None:
    model = Regression((0.0, 0.1, 0.0), 0.9, 0.1, shrink=(0.1, 0.0, 0.01))
    for y, z, seconds in seen:
        model.observe((1.0, y, z), seconds, 0.05)
    assert all(0.0 <= coefficient < 1e9 for coefficient in model.coefficients)


def test_a_negative_coefficient_is_0_and_the_others_compensate() -> None:
    assert non_negative([[1.0, 0.5], [0.5, 1.0]], [1.0, 0.2]) == [1.0, 0.0]
    assert non_negative([[1.0]], [-1.0]) == [0.0]
