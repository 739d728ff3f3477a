"""Tokens of an issuer, with real keys."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.authenticator import Authenticator, authenticator_of
from proxy.auth.settings import AuthSettings, Jwt
from proxy.core.errors import ConfigError, Forbidden, IssuerUnreachable, Unauthorized
from proxy.core.params import load
from proxy.core.ports import Identity, ManualClock
from proxy.core.state import State

jwt = pytest.importorskip("jwt", reason="needs the extra: pip install 'kvlane[jwt]'")

from proxy.auth import jwt_tokens  # noqa: E402
from tests.helpers.auth.issuer import AUDIENCE, NAME, Issuer  # noqa: E402

SETTINGS = {"jwks": "https://issuer.example/keys", "issuer": NAME, "audience": [AUDIENCE]}


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    issuer = Issuer()
    issuer.rotate("one")
    return issuer


class World:
    """A door, and the state that it was built around."""

    authenticator: Authenticator

    def __init__(self, issuer: Issuer, **more: Any) -> None:
        self.issuer = issuer
        self.clock = ManualClock(wall=issuer.time)
        self.state = State()
        self._load(**more)

    async def reload(self, **more: Any) -> None:
        self._load(**more)
        await self.state.finish_commit()

    def _load(self, **more: Any) -> None:
        settings = {"jwt": {**SETTINGS, **more}, "apiKeys": [{"name": "static", "key": "k"}]}
        draft = self.state.draft()
        made = authenticator_of(load(AuthSettings, settings), self.clock, {}, self.issuer.fetch, draft)
        assert made is not None
        self.authenticator = made
        draft.commit()

    async def ask(self, token: str, scope: Any = "inference") -> Identity:
        return await self.authenticator.authenticate({"authorization": f"Bearer {token}"}, scope)


@asynccontextmanager
async def world(issuer: Issuer, **more: Any) -> AsyncIterator[World]:
    made = World(issuer, **more)
    await made.state.finish_commit()
    try:
        yield made
    finally:
        await made.state.close()


async def test_a_valid_token_is_accepted_with_keys_configured(issuer: Issuer) -> None:
    async with world(issuer) as w:
        identity = await w.ask(issuer.token("one"))
        assert (identity.name, identity.tenant, identity.models) == ("jwt:alice", "jwt:alice", None)
        assert (await w.ask("k")).name == "static"


@pytest.mark.parametrize("algorithm", ["RS512", "PS256", "ES256", "EdDSA"])
async def test_every_public_key_algorithm_is_accepted(algorithm: str) -> None:
    issuer = Issuer()
    issuer.rotate("k", algorithm)
    async with world(issuer, algorithms=[algorithm]) as w:
        assert (await w.ask(issuer.token("k"))).name == "jwt:alice"


@pytest.mark.parametrize(
    ("claims", "fault"),
    [
        ({"iss": "https://other.example"}, "another issuer"),
        ({"aud": "somebody-else"}, "audience"),
        ({"aud": None}, "no claim 'aud'"),
        ({"exp": None}, "no claim 'exp'"),
        ({"exp": 1_700_000_000 - 31}, "expired"),
        ({"nbf": 1_700_000_000 + 31}, "not valid yet"),
        ({"nbf": "soon"}, "not valid yet"),
        ({"exp": 10**400}, "must be a time"),
        ({"exp": "later"}, "must be a time"),
        ({"exp": True}, "must be a time"),
        ({"sub": None}, "no claim 'sub'"),
        ({"sub": ""}, "must be a time and a name"),
        ({"sub": "x" * 300}, "must be a time and a name"),
        ({"sub": "a\nb"}, "must be a time and a name"),
        ({"sub": "\ud800"}, "must be a time and a name"),
    ],
)
async def test_a_token_for_another_audience_is_refused(issuer: Issuer, claims: Mapping[str, Any], fault: str) -> None:
    async with world(issuer) as w:
        with pytest.raises(Unauthorized, match=fault):
            await w.ask(issuer.token("one", **claims))


async def test_clock_skew_is_tolerated(issuer: Issuer) -> None:
    async with world(issuer) as w:
        await w.ask(issuer.token("one", exp=issuer.time - 29, nbf=issuer.time + 29))


async def test_a_cached_token_expires(issuer: Issuer) -> None:
    async with world(issuer) as w:
        token = issuer.token("one", exp=issuer.time + 60)
        await w.ask(token)
        w.clock.advance(59 + jwt_tokens.LEEWAY)
        await w.ask(token)
        w.clock.advance(1)
        with pytest.raises(Unauthorized, match="expired"):
            await w.ask(token)


async def test_a_changed_token_is_refused(issuer: Issuer) -> None:
    async with world(issuer) as w:
        head, payload, signature = issuer.token("one").split(".")
        claims = orjson.loads(base64.urlsafe_b64decode(payload + "=="))
        forged = base64.urlsafe_b64encode(orjson.dumps({**claims, "sub": "root"})).rstrip(b"=").decode()
        for token in (
            f"{head}.{forged}.{signature}",
            f"{head}.{payload}.",
            f"{head}.{payload}.{signature[:-8]}AAAAAAAA",
        ):
            with pytest.raises(Unauthorized):
                await w.ask(token)


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
async def test_an_unsigned_or_symmetric_token_is_refused(issuer: Issuer, algorithm: str) -> None:
    claims = {"iss": NAME, "aud": AUDIENCE, "sub": "alice", "exp": issuer.time + 60}
    token = jwt.encode(claims, None if algorithm == "none" else "s" * 64, algorithm, headers={"kid": "one"})
    async with world(issuer) as w:
        with pytest.raises(Unauthorized, match="algorithm"):
            await w.ask(token)


async def test_a_key_works_with_its_own_algorithm_only() -> None:
    issuer = Issuer()
    issuer.rotate("k", "RS512", alg="RS256")
    async with world(issuer, algorithms=["RS256", "RS512"]) as w:
        with pytest.raises(Unauthorized, match="meant for"):
            await w.ask(issuer.token("k"))


async def test_an_encryption_key_cannot_sign(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer()
    issuer.rotate("k", use="enc")
    async with world(issuer) as w:
        with pytest.raises(IssuerUnreachable):
            await w.ask(issuer.token("k"))
    assert "no key for signatures" in caplog.text


async def test_a_new_key_is_fetched_with_its_first_token() -> None:
    issuer = Issuer()
    issuer.rotate("one")
    async with world(issuer) as w:
        await w.ask(issuer.token("one"))
        issuer.rotate("two", keep=True)
        await w.ask(issuer.token("two"))
        await w.ask(issuer.token("one"))
        assert issuer.requests == 2


async def test_a_withdrawn_key_is_refused() -> None:
    issuer = Issuer()
    issuer.rotate("one")
    async with world(issuer) as w:
        old = issuer.token("one")
        await w.ask(old)
        issuer.rotate("two")
        await w.ask(issuer.token("two"))
        w.clock.advance(jwt_tokens.COOLDOWN)
        with pytest.raises(Unauthorized, match="issuer has"):
            await w.ask(old)


async def test_unknown_key_ids_do_not_cause_repeated_fetches(issuer: Issuer) -> None:
    stranger = Issuer()
    for number in range(5):
        stranger.rotate(f"made-up-{number}", "ES256")
    async with world(issuer, algorithms=["RS256", "ES256"]) as w:
        await w.ask(issuer.token("one"))
        before = issuer.requests
        for number in range(5):
            with pytest.raises(Unauthorized):
                await w.ask(stranger.token(f"made-up-{number}"))
        assert issuer.requests - before == 1


async def test_an_unknown_key_id_is_refused_after_a_read_that_was_running(issuer: Issuer) -> None:
    stranger = Issuer()
    stranger.rotate("made-up", "ES256")
    async with world(issuer, algorithms=["RS256", "ES256"]) as w:
        before = issuer.requests
        with pytest.raises(Unauthorized, match="issuer has"):  # it waits for the first read
            await w.ask(stranger.token("made-up"))
        assert issuer.requests - before == 1


async def test_known_keys_stay_while_the_issuer_is_down(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer()
    issuer.rotate("one")
    async with world(issuer) as w:
        await w.ask(issuer.token("one", sub="early"))
        issuer.status = 503
        issuer.rotate("two")
        with caplog.at_level(logging.ERROR), pytest.raises(IssuerUnreachable):  # it may be a new key
            await w.ask(issuer.token("two"))
        assert "the response has the status 503" in caplog.text
        await w.ask(issuer.token("one", sub="late"))


async def test_known_keys_survive_a_reload_while_the_issuer_is_down() -> None:
    issuer = Issuer()
    issuer.rotate("one")
    async with world(issuer) as w:
        await w.ask(issuer.token("one"))
        issuer.status = 503
        await w.reload(audience=[AUDIENCE, "another"])
        assert (await w.ask(issuer.token("one"))).name == "jwt:alice"
        await w.reload(jwks="https://other.example/keys")
        with pytest.raises(IssuerUnreachable):
            await w.ask(issuer.token("one"))


async def test_the_wait_for_a_silent_issuer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "PATIENCE", 0.02)
    issuer = Issuer()
    issuer.rotate("one")
    turn = asyncio.Event()

    async def fetch(url: str) -> tuple[int, bytes]:
        await turn.wait()
        return 200, issuer.published()

    issuer.fetch = fetch  # type: ignore[method-assign]
    async with world(issuer) as w:
        with pytest.raises(IssuerUnreachable, match="Could not fetch"):
            await w.ask(issuer.token("one"))
        assert (await w.ask("k")).name == "static"
        turn.set()
        await asyncio.sleep(0.01)
        await w.ask(issuer.token("one"))


async def test_an_issuer_that_refuses_connections_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def fetch(url: str) -> tuple[int, bytes]:
        raise ConnectionRefusedError("refused")

    issuer = Issuer()
    issuer.rotate("one")
    issuer.fetch = fetch  # type: ignore[method-assign]
    async with world(issuer) as w:
        with pytest.raises(IssuerUnreachable):
            await w.ask(issuer.token("one"))
        assert (await w.ask("k")).name == "static"
    assert "refused" in caplog.text


async def test_keys_may_be_in_a_file(tmp_path: Path, issuer: Issuer) -> None:
    (tmp_path / "keys.json").write_bytes(issuer.published())
    async with world(issuer, jwks=str(tmp_path / "keys.json")) as w:
        assert (await w.ask(issuer.token("one"))).name == "jwt:alice"


@pytest.mark.parametrize("text", [b"", b"[]", b'{"keys": 1}', b'{"keys": []}', b'{"keys": [{"kty": "RSA", "n": "!"}]}'])
def test_an_invalid_jwks_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        jwt_tokens.read_keys(text)


async def test_claims_give_tenant_models_and_scopes(issuer: Issuer) -> None:
    claims = {"org": {"name": "acme"}, "models": ["llama-*"], "scope": "openid inference"}
    async with world(issuer, tenantClaim="org.name", modelsClaim="models", scopesClaim="scope") as w:
        identity = await w.ask(issuer.token("one", **claims))
        assert (identity.name, identity.tenant, identity.models) == ("jwt:alice", "acme", frozenset(("llama-*",)))
        with pytest.raises(Forbidden, match="no scope 'admin'"):
            await w.ask(issuer.token("one", **claims), "admin")
        boss = issuer.token("one", **{**claims, "scope": ["admin"]})
        assert (await w.ask(boss, "admin")).name == "jwt:alice"
        with pytest.raises(Forbidden):
            await w.ask(boss)


async def test_a_missing_claim_allows_nothing(issuer: Issuer) -> None:
    async with world(issuer, modelsClaim="models") as w:
        assert (await w.ask(issuer.token("one"))).models == frozenset()
    async with world(issuer, tenantClaim="org") as w:
        with pytest.raises(Unauthorized, match="no claim 'org'"):
            await w.ask(issuer.token("one"))
    async with world(issuer, scopesClaim="scope") as w:
        with pytest.raises(Forbidden):
            await w.ask(issuer.token("one"))


async def test_without_a_scopes_claim_no_token_is_an_administrator(issuer: Issuer) -> None:
    async with world(issuer) as w:
        with pytest.raises(Forbidden):
            await w.ask(issuer.token("one", scope="admin"), "admin")


async def test_a_valid_token_is_cached(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(issuer) as w:
        token = issuer.token("one")
        await w.ask(token)
        monkeypatch.setattr(jwt, "decode", None)
        await w.ask(token)


@given(st.text(st.characters(exclude_categories=())), st.text(), st.text())
def test_arbitrary_text_is_not_a_token(head: str, payload: str, signature: str) -> None:
    strange = base64.urlsafe_b64encode(head.encode("utf-8", "surrogatepass")).decode()
    for first in (head, strange):
        assert not knocked(f"{first}.{payload}.{signature}")


def knocked(token: str) -> Identity | None:
    try:
        return World(Issuer()).authenticator.find({"authorization": f"Bearer {token}"})
    except Unauthorized:
        return None


def test_a_deeply_nested_head_is_refused() -> None:
    head = base64.urlsafe_b64encode(b"[" * 9000).decode()
    with pytest.raises(Unauthorized):
        World(Issuer()).authenticator.find({"authorization": f"Bearer {head}.e30.e30"})


@pytest.mark.parametrize("missing", ["jwks", "issuer", "audience"])
def test_issuer_and_audience_are_required(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        load(Jwt, {name: value for name, value in SETTINGS.items() if name != missing})


@pytest.mark.parametrize("fields", [{"audience": []}, {"issuer": ""}, {"algorithms": []}, {"algorithms": ["HS256"]}])
def test_insecure_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load(Jwt, {**SETTINGS, **fields})


async def test_a_token_is_not_called_forged_while_no_key_is_available(issuer: Issuer) -> None:
    token, issuer.status = issuer.token("one"), 503
    async with world(issuer) as w:
        for _ in range(2):
            with pytest.raises(IssuerUnreachable, match="Could not fetch"):
                await w.ask(token)
        issuer.status = 200
        w.clock.advance(jwt_tokens.COOLDOWN)
        await w.ask(token)
