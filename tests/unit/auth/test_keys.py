"""API keys: their holders and their scopes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.authenticator import Keys, hashed, new_key, presented_secret
from proxy.auth.settings import ApiKey, Limits
from proxy.core.errors import Forbidden, Unauthorized
from proxy.core.params import moment
from proxy.core.ports import ManualClock, allows

CLOCK = ManualClock(wall=moment("2026-06-01"))
KEYS = Keys(
    [
        ApiKey("plain", key="secret-1"),
        ApiKey("team", hash=hashed("secret-2"), tenant="acme", models=("llama-*",), limits="small"),
        ApiKey("boss", key="secret-3", scopes=("admin",)),
        ApiKey("guest", key="secret-4", limits=Limits(requests_per_minute=1)),
    ],
    CLOCK,
)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-1"},
        {"authorization": "bearer  secret-1 "},
        {"x-api-key": "secret-1"},
        {"api-key": "secret-1"},
        {"authorization": "Basic a", "x-api-key": "secret-1"},
        {"authorization": "Bearer secret-1", "x-api-key": "b"},
    ],
)
def test_a_key_is_found_in_every_supported_header(headers: dict[str, str]) -> None:
    assert presented_secret(headers) == "secret-1"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic secret-1"}, {"authorization": "Bearer "}])
def test_without_a_key_none_is_found(headers: dict[str, str]) -> None:
    assert presented_secret(headers) is None


def test_a_key_has_its_name_and_permissions() -> None:
    team, plain = KEYS.find("secret-2", "inference"), KEYS.find("secret-1", "inference")
    assert team is not None
    assert plain is not None
    assert (plain.name, plain.tenant, plain.models) == ("plain", "plain", None)
    assert (team.name, team.tenant, team.limits) == ("team", "acme", "limits.small")
    assert allows(team.models, "llama-70b")
    assert not allows(team.models, "qwen")
    assert allows(plain.models, "anything")


def test_inline_limits_have_a_name() -> None:
    guest = KEYS.find("secret-4", "inference")
    assert guest is not None
    assert KEYS.limits == {guest.limits: Limits(requests_per_minute=1)}


@given(st.text(st.characters(exclude_categories=())))
def test_other_keys_are_unknown(secret: str) -> None:
    assert KEYS.find(secret, "inference") is None or secret in {f"secret-{number}" for number in (1, 2, 4)}


def test_a_key_has_its_scopes_only() -> None:
    with pytest.raises(Forbidden, match="boss"):
        KEYS.find("secret-3", "inference")
    with pytest.raises(Forbidden):
        KEYS.find("secret-1", "admin")
    assert KEYS.find("secret-3", "admin") is not None


def test_an_expired_key_is_refused() -> None:
    clock = ManualClock(wall=moment("2026-06-30T23:59:59Z"))
    keys = Keys([ApiKey("brief", key="k", expires=moment("2026-07-01"))], clock)
    assert keys.find("k", "inference") is not None
    clock.advance(1.0)
    with pytest.raises(Unauthorized, match="expired"):
        keys.find("k", "inference")


def test_two_names_for_one_key_are_an_error() -> None:
    with pytest.raises(ValueError, match="'a' and 'b' are the same key"):
        Keys([ApiKey("a", key="k"), ApiKey("b", hash=hashed("k"))], CLOCK)


def test_generated_keys_differ_and_fit_into_a_header() -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert len(first) >= 40
    assert presented_secret({"authorization": f"Bearer {first}"}) == first


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"key": "k"}, "needs a name"),
        ({"name": "n"}, "one of them"),
        ({"name": "n", "key": "k", "hash": hashed("k")}, "one of them"),
        ({"name": "n", "key": " "}, "is empty"),
        ({"name": "n", "hash": "md5:abc"}, "64 hex digits"),
    ],
)
def test_an_invalid_key_is_refused(fields: dict[str, str], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ApiKey(**fields)  # type: ignore[arg-type]


def test_secrets_are_neither_stored_nor_shown() -> None:
    assert "secret-1" not in repr(vars(KEYS))
    assert "secret-1" not in repr(ApiKey("plain", key="secret-1"))
