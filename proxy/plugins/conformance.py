"""Plugins that the conformance tests of the Gateway API inference extension need; not for production."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.attempt import Attempt
from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Filter, PreRequest, plugin
from proxy.core.request import InferenceRequest

SELECTION_HEADER = "test-epp-endpoint-selection"
SERVED_HEADER = "x-conformance-test-served-endpoint"


@plugin("header-based-testing-filter")
@dataclass(frozen=True, slots=True)
class HeaderBasedTestingFilter(Filter):
    """Keeps the pods that the header test-epp-endpoint-selection lists as `IP` or `IP:port`; no pod without it."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        listed = {item.strip() for item in request.headers.get(SELECTION_HEADER, "").split(",")}
        listed |= {item.strip("[]") for item in listed}
        addresses = ((endpoint, urlsplit(endpoint.url)) for endpoint in endpoints)
        return [endpoint for endpoint, url in addresses if url.netloc in listed or url.hostname in listed]


@plugin("destination-endpoint-served-verifier")
@dataclass(frozen=True, slots=True)
class DestinationEndpointServedVerifier(PreRequest):
    """Adds the header x-conformance-test-served-endpoint with the address of the pod to the response."""

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        attempt.response_headers.append((SERVED_HEADER, urlsplit(endpoint.url).netloc))
