"""What becomes of a request once it is known who sends it."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from proxy.auth.authenticator import Admission
from proxy.core.errors import UnknownModel
from proxy.core.ports import IDENTITY, Identity
from proxy.core.request import InferenceRequest

CHAT = "/v1/chat/completions"
ACME = Identity("key", "acme", frozenset(("llama-*",)))


def request(model: str = "llama-8b", stream: bool = True) -> InferenceRequest:
    body = orjson.dumps({"model": model, "messages": [], "stream": stream})
    return InferenceRequest("r", CHAT, model, body=body, stream=stream)


class Renaming:
    """A resolver of models."""

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        return replace(request, model="other", tenant="from-a-header")


def test_the_request_is_its_tenants_and_its_sender_is_known_to_all_who_follow() -> None:
    resolved = Admission().resolve(request(), ACME)
    assert resolved.tenant == "acme"
    assert resolved.state.read(IDENTITY) is ACME
    assert resolved.body == request().body


def test_a_model_that_it_may_not_ask_for_does_not_exist() -> None:
    with pytest.raises(UnknownModel):
        Admission().resolve(request("qwen"), ACME)


def test_a_key_names_models_as_clients_do_and_the_tenant_is_not_for_headers_to_say() -> None:
    resolved = Admission(Renaming()).resolve(request(), ACME)
    assert (resolved.model, resolved.tenant) == ("other", "acme")


def test_whose_tokens_are_limited_has_his_pods_asked_for_usage() -> None:
    admission = Admission(counts_tokens=lambda identity: identity is ACME)
    assert admission.resolve(request(), ACME).asks_usage
    assert not admission.resolve(request(stream=False), ACME).asks_usage
    assert not admission.resolve(request(), Identity("other")).asks_usage


def test_what_comes_from_nobody_passes() -> None:
    asked = request()
    assert Admission(counts_tokens=lambda identity: True).resolve(asked, None) is asked
    assert Admission(Renaming(), lambda identity: True).resolve(asked, None).model == "other"
