"""The resolver that checks the models of a key and notes its identity."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from proxy.auth.authenticator import AuthorizingResolver
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


def test_the_tenant_and_sender_are_set_for_later_steps() -> None:
    resolved = AuthorizingResolver().resolve(request(), ACME)
    assert resolved.tenant == "acme"
    assert resolved.state.read(IDENTITY) is ACME
    assert resolved.body == request().body


def test_a_forbidden_model_does_not_exist() -> None:
    with pytest.raises(UnknownModel):
        AuthorizingResolver().resolve(request("qwen"), ACME)


def test_models_of_a_key_are_client_names_and_headers_cannot_set_the_tenant() -> None:
    resolved = AuthorizingResolver(Renaming()).resolve(request(), ACME)
    assert (resolved.model, resolved.tenant) == ("other", "acme")


def test_usage_is_requested_for_keys_with_token_limits() -> None:
    resolver = AuthorizingResolver(counts_tokens=lambda identity: identity is ACME)
    assert resolver.resolve(request(), ACME).usage_added
    assert not resolver.resolve(request(stream=False), ACME).usage_added
    assert not resolver.resolve(request(), Identity("other")).usage_added


def test_requests_without_a_key_pass_if_none_is_configured() -> None:
    incoming = request()
    assert AuthorizingResolver(counts_tokens=lambda identity: True).resolve(incoming, None) is incoming
    assert AuthorizingResolver(Renaming(), lambda identity: True).resolve(incoming, None).model == "other"
