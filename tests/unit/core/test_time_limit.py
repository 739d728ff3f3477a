"""What clients say of the time they have."""

from __future__ import annotations

import pytest

from proxy.core.errors import BadRequest
from proxy.core.request import TIME_LIMIT, time_limit


def test_the_earlier_of_client_and_configured_limit_applies() -> None:
    assert time_limit({}, 30.0) == 30.0
    assert time_limit({TIME_LIMIT: "1500"}, 30.0) == 1.5
    assert time_limit({TIME_LIMIT: "60000"}, 30.0) == 30.0


@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan"])
def test_an_invalid_time_is_a_bad_request(value: str) -> None:
    with pytest.raises(BadRequest, match=TIME_LIMIT):
        time_limit({TIME_LIMIT: value}, 30.0)
