"""The `disaggregation` section."""

from __future__ import annotations

import pytest

from proxy.core import params
from proxy.core.errors import ConfigError
from proxy.disagg.connectors import NAMES
from proxy.disagg.settings import DisaggregationSettings


@pytest.mark.parametrize("name", NAMES)
def test_every_connector_can_be_configured(name: str) -> None:
    assert params.load(DisaggregationSettings, {"connector": name}).connector == name


@pytest.mark.parametrize(
    ("name", "message"), [("nixel", "did you mean 'nixl'"), ("telepathy", "known are mooncake, nixl,")]
)
def test_an_unknown_connector_is_refused_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        params.load(DisaggregationSettings, {"connector": name})
    (problem,) = caught.value.problems
    assert message in problem.message
