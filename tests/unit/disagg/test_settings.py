"""The `disaggregation` section."""

from __future__ import annotations

import pytest

from proxy.core import params
from proxy.core.errors import ConfigError
from proxy.disagg.connectors import CONNECTORS
from proxy.disagg.settings import DisaggregationSettings


@pytest.mark.parametrize("name", list(CONNECTORS))
def test_every_connector_can_be_configured(name: str) -> None:
    assert params.load(DisaggregationSettings, {"connector": name}).connector == name


@pytest.mark.parametrize(
    ("name", "said"), [("nixel", "did you mean 'nixl'"), ("telepathy", "known are mooncake, nixl,")]
)
def test_what_is_none_is_said_with_what_there_is(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        params.load(DisaggregationSettings, {"connector": name})
    (problem,) = caught.value.problems
    assert said in problem.message
