"""What the producers write, and what they refuse."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.request import OUTPUT_ESTIMATE, InferenceRequest
from proxy.plugins.producers.session_id import SESSION_ID
from proxy.prefix.match import PREFIX_MATCH, TOKEN_IDS, TOKENIZED_PROMPT
from tests.helpers.plugins.situations import fault, make, request


async def produced(kind: str, incoming: InferenceRequest, **given: Any) -> InferenceRequest:
    await make(kind, name="mine", **given).produce(incoming, [])
    return incoming


class TestTokens:
    async def test_the_estimate_is_the_parsed_prompt_for_the_instance(self) -> None:
        incoming = await produced("token-producer", request(7), estimate={})
        assert incoming.state.read(TOKENIZED_PROMPT.of("mine")) is incoming.prompt
        assert incoming.state.read(TOKENIZED_PROMPT) is incoming.prompt

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"vllm": {}, "udsTokenizerConfig": {}}, "the modes vllm and uds exclude each other"),
            ({"vllm": {"url": "http://x"}, "pod": {}}, "the modes pod and vllm exclude each other"),
            ({"local": {}}, "local.model: is required"),
        ],
    )
    def test_parameters_without_effect_are_refused(self, given: dict[str, Any], message: str) -> None:
        assert message in fault("token-producer", **given)

    @pytest.mark.parametrize(
        "given",
        [
            {"vllm": {}},
            {"pod": {}},
            {"uds": {}},
            {"vllm": {"endpointDiscovery": {}}},
            {"local": {"model": "m"}},
            {"modelName": "m"},
        ],
        ids=str,
    )
    async def test_remote_modes_provide_token_ids_and_fall_back_to_estimates(self, given: Any) -> None:
        incoming = await produced("token-producer", request(7), **given)
        made = make("token-producer", **given)
        assert made.waits
        assert TOKEN_IDS.of("token-producer") in made.provides
        assert incoming.state.read(TOKEN_IDS) is None
        assert incoming.state.read(TOKENIZED_PROMPT) is incoming.prompt

    def test_an_estimate_provides_no_token_ids_and_does_not_wait(self) -> None:
        made = make("token-producer")
        assert not made.waits
        assert made.provides == (TOKENIZED_PROMPT.of("token-producer"),)

    def test_the_older_name_uses_the_pods_by_default(self) -> None:
        assert TOKEN_IDS.of("tokenizer") in make("tokenizer").provides
        assert TOKEN_IDS.of("tokenizer") in make("tokenizer", modelName="m").provides


class TestOutputEstimate:
    async def test_it_is_written_only_on_request(self) -> None:
        assert (await produced("inflight-load-producer", request(10))).state.read(OUTPUT_ESTIMATE) is None
        incoming = await produced("inflight-load-producer", request(10), addEstimatedOutputTokens=True)
        assert incoming.state.read(OUTPUT_ESTIMATE) == 15

    @given(
        tokens=st.integers(0, 10_000),
        ratio=st.floats(0, 4),
        client=st.integers(0, 5000),
        most=st.none() | st.integers(0, 5000),
    )
    def test_it_is_capped_by_the_client_and_by_the_configuration(
        self, tokens: int, ratio: float, client: int, most: int | None
    ) -> None:
        producer = make("inflight-load-producer", outputRatio=ratio, maxEstimatedOutputTokens=most)
        estimate = producer.estimate(tokens, client)
        caps = ([client] if client else []) + ([most] if most is not None else [])
        assert estimate == min([round(tokens * ratio), *caps])

    def test_a_bound_prefix_match_must_exist(self) -> None:
        bound = make("inflight-load-producer", prefixMatchInfoProducerName="approx")
        assert bound.requires == (PREFIX_MATCH.of("approx"),)
        assert make("inflight-load-producer").requires == ()

    def test_a_negative_ratio_is_refused(self) -> None:
        assert "outputRatio: must be at least 0" in fault("inflight-load-producer", outputRatio=-1)


class TestSessionId:
    @pytest.mark.parametrize(
        ("given", "headers", "expected"),
        [
            ({}, {"x_session_id": " s "}, "s"),
            ({"headerName": "X-Chat"}, {"x_chat": "c", "x_session_id": "s"}, "c"),
            ({"cookieName": "sid"}, {"cookie": "a=1; sid=abc; b=2"}, "abc"),
            ({"cookieName": "sid"}, {"cookie": "a=1"}, None),
            ({"cookieName": "sid"}, {"cookie": '"""'}, None),
            ({"cookieName": "sid"}, {"cookie": 'prefs={"a": 1}; b[0]=c d; flag; sid="abc="'}, "abc="),
            ({"cookieName": "sid"}, {"x_session_id": "s"}, None),
            ({}, {"x_session_id": "  "}, None),
            ({}, {}, None),
        ],
    )
    async def test_the_origin_of_the_value_is_reported(
        self, given: dict[str, Any], headers: dict[str, str], expected: str | None
    ) -> None:
        incoming = await produced("session-id-producer", request(**headers), **given)  # type: ignore[arg-type]
        assert incoming.state.read(SESSION_ID.of("mine")) == expected

    def test_header_and_cookie_exclude_each_other(self) -> None:
        assert "exclude each other" in fault("session-id-producer", headerName="a", cookieName="b")
