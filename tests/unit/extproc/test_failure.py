"""What Envoy's response code details say about a pod."""

from __future__ import annotations

import pytest

from proxy.core.errors import BadGateway, EnvoyOverflow, GatewayTimeout, TriedByEnvoy
from proxy.extproc.relay import failure

BEFORE = "upstream_reset_before_response_started{%s}"


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("no_healthy_upstream", TriedByEnvoy),
        (BEFORE % "connection_failure", TriedByEnvoy),
        (BEFORE % "remote_connection_failure|delayed_connect_error:_111", TriedByEnvoy),
        (BEFORE % "connection_timeout", TriedByEnvoy),
        (BEFORE % "remote_refused_stream_reset", TriedByEnvoy),
        (BEFORE % "overflow", EnvoyOverflow),
        (BEFORE % "connection_termination", BadGateway),
        (BEFORE % "protocol_error", BadGateway),
        (BEFORE % "remote_reset", BadGateway),
        ("upstream_reset_after_response_started{remote_reset}", BadGateway),
        ("upstream_response_timeout", GatewayTimeout),
        ("upstream_per_try_idle_timeout", GatewayTimeout),
        ("upstream_max_stream_duration_reached", GatewayTimeout),
    ],
)
def test_the_details_decide_who_is_at_fault(details: str, expected: type[Exception]) -> None:
    assert type(failure(details)) is expected
