"""What clients say of the time they have."""

from __future__ import annotations

import pytest

from proxy.core.errors import BadRequest
from proxy.core.request import TIME_LIMIT, time_limit


def test_the_sooner_of_what_the_client_says_and_what_is_configured_counts() -> None:
    assert time_limit({}, 30.0) == 30.0
    assert time_limit({TIME_LIMIT: "1500"}, 30.0) == 1.5
    assert time_limit({TIME_LIMIT: "60000"}, 30.0) == 30.0


@pytest.mark.parametrize("said", ["", "soon", "0", "-5", "nan"])
def test_what_is_no_time_is_a_bad_request(said: str) -> None:
    with pytest.raises(BadRequest, match=TIME_LIMIT):
        time_limit({TIME_LIMIT: said}, 30.0)
