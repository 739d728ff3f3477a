import json

import pytest

from proxy.core import errors
from proxy.core.errors import (
    BadRequest,
    IssuerUnreachable,
    MethodNotAllowed,
    NoEndpoints,
    RequestError,
    Saturated,
    SuspectedPoison,
    UnknownModel,
)
from proxy.openai.errors import render, stream_error


def rendered(error: RequestError, path: str = "/v1/chat/completions") -> tuple[int, dict[str, str], dict[str, object]]:
    status, headers, body = render(error, path, "id-1")
    return status, dict(headers), json.loads(body)


def test_an_openai_error_has_its_four_fields() -> None:
    status, headers, body = rendered(UnknownModel("x"))
    assert status == 404
    assert body["error"] == {
        "message": "The model `x` does not exist; GET /v1/models lists the models that do.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert headers["x-kvlane-reason"] == "unknown-model"
    assert headers["x-request-id"] == "id-1"


def test_an_anthropic_error_has_anthropics_shape() -> None:
    _, _, body = rendered(BadRequest("no"), "/v1/messages")
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}, "request_id": "id-1"}


def test_an_unreachable_issuer_is_not_the_clients_fault() -> None:
    status, headers, _ = rendered(IssuerUnreachable())
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert "www-authenticate" not in headers


@pytest.mark.parametrize("error", [NoEndpoints("none"), Saturated("full")])
def test_a_temporary_refusal_has_retry_after_and_llm_ds_reason(error: RequestError) -> None:
    _, headers, _ = rendered(error)
    assert int(headers["retry-after"]) >= 1
    assert headers["x-llm-d-request-dropped-reason"] == headers["x-kvlane-reason"] == error.reason.value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/rerank"])
def test_clients_of_every_api_learn_not_to_retry_a_suspected_request(path: str) -> None:
    status, headers, _ = rendered(SuspectedPoison(60.0), path)
    assert (status, headers["x-should-retry"]) == (503, "false")
    assert "x-should-retry" not in rendered(NoEndpoints("none"), path)[1]


def test_a_wrong_method_names_the_right_ones() -> None:
    assert rendered(MethodNotAllowed("no", ["GET", "POST"]))[1]["allow"] == "GET, POST"


def test_every_error_class_has_its_own_status_and_a_reason() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RequestError)]
    assert all(400 <= cls.status < 600 and cls.reason for cls in classes)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_error_is_one_whole_event_with_its_message(path: str) -> None:
    event = stream_error(path, "the pod went away")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    data = next(line for line in event.split(b"\n") if line.startswith(b"data: "))
    assert "the pod went away" in json.dumps(json.loads(data[6:]))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_message_outside_utf8_is_rendered(path: str) -> None:
    status, _, body = render(UnknownModel("\ud800"), path, "id-\udcff")
    assert status == 404
    assert "`\\ud800` does not exist" in json.loads(body)["error"]["message"]


def test_a_long_unknown_name_is_truncated() -> None:
    assert len(UnknownModel("x" * 10_000).message) < 500
