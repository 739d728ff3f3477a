"""What is learnt from the response of a pod to which Envoy went on by itself."""

import pytest

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.ports import InstanceName, ManualClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import PluginState
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from tests.helpers.latency.pods import respond


@pytest.mark.parametrize("by_envoy", [True, False])
def test_the_time_to_first_token_is_learnt_only_if_the_proxy_knows_when_the_pod_got_the_request(by_envoy: bool) -> None:
    clock, endpoint = ManualClock(), Endpoint("p")
    producer = PredictedLatencyProducer(InstanceName("latency"), clock, PluginState())
    producer.known((endpoint,), 0.0)
    for number in range(3):
        request = InferenceRequest(str(number), "/v1/completions", "m", Prompt((b"x" * 4000,)), stream=True)
        attempt = Attempt(request, Decision(endpoint), endpoint, number, clock.now())
        attempt.sent_at = clock.now() if by_envoy else None
        producer.pre_request(attempt, endpoint)
        clock.advance(0.0 if by_envoy else 0.1)
        respond(attempt, clock.now())
        producer.post_response(attempt, endpoint)
        clock.advance(1.0)
    assert (producer.backlog((endpoint,)) is None) is by_envoy
