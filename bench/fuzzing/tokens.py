"""Tokens of an issuer, and the documents with its keys."""

from __future__ import annotations

import json
import random
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from bench.fuzzing.inputs import Check
from proxy.auth.authenticator import Authenticator, authenticator_of
from proxy.auth.settings import AuthSettings
from proxy.core.errors import Forbidden, IssuerUnreachable, Unauthorized
from proxy.core.params import load
from proxy.core.ports import ManualClock
from proxy.core.state import State

NAME, AUDIENCE, NOW = "https://issuer.example", "kvlane", 1_700_000_000.0
ALGORITHMS = ["RS256", "ES256", "EdDSA"]

KEY = ec.derive_private_key(20_301_001, ec.SECP256R1())
"""Always the same, so that an input means the same in every run."""


def published(*more: object) -> bytes:
    key = {**ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True), "kid": "one"}
    return orjson.dumps({"keys": [key, *more]})


@asynccontextmanager
async def tokens() -> AsyncIterator[Check]:
    """An input is a document of keys; or a token; or two lines, header and claims, which the issuer signs."""
    document = published()
    settings = {"jwks": f"{NAME}/keys", "issuer": NAME, "audience": [AUDIENCE], "algorithms": ALGORITHMS}
    claims = {"modelsClaim": "models", "tenantClaim": "realm.tenant", "scopesClaim": "scope"}

    async def fetch(url: str) -> tuple[int, bytes]:
        return 200, document

    @asynccontextmanager
    async def authenticator(**more: Any) -> AsyncIterator[Authenticator]:
        state = State()
        draft = state.draft()
        made = authenticator_of(
            load(AuthSettings, {"jwt": {**settings, **more}}), ManualClock(wall=NOW), {}, fetch, draft
        )
        assert made is not None
        draft.commit()
        await state.finish_commit()
        yield made
        await state.close()

    async with authenticator() as plain, authenticator(**claims) as claiming:

        async def check(data: bytes, rng: random.Random) -> str:
            nonlocal document
            if data.lstrip().startswith(b'{"keys"'):
                document = data
                try:
                    async with authenticator() as other:
                        await _name(other, _signed(b'{"alg":"ES256","kid":"one"}', _GOOD))
                finally:
                    document = published()
                return ""
            head, new_line, claims_text = data.partition(b"\n")
            token = _signed(head, claims_text) if new_line else data.decode("latin-1")
            for one in (plain, claiming):
                name = await _name(one, token)
                if name is not None and (
                    wrong := _wrong(name, claims_text) if new_line else _wrong_bare(token.strip(" \t"))
                ):
                    return f"let in as {name!r}: {wrong}"
            return ""

        yield check


_GOOD = orjson.dumps({"iss": NAME, "aud": AUDIENCE, "sub": "alice", "exp": NOW + 3600})


async def _name(authenticator: Authenticator, token: str) -> str | None:
    try:
        identity = await authenticator.authenticate({"authorization": f"Bearer {token}"})
    except (Unauthorized, Forbidden, IssuerUnreachable):
        return None
    return identity.name


def _signed(head: bytes, claims_text: bytes) -> str:
    text = urlsafe_b64encode(head).rstrip(b"=") + b"." + urlsafe_b64encode(claims_text).rstrip(b"=")
    signature = ECAlgorithm(ECAlgorithm.SHA256).sign(text, KEY)
    return (text + b"." + urlsafe_b64encode(signature).rstrip(b"=")).decode()


def _wrong(name: str, claims_text: bytes) -> str:
    """Return why the claims do not name this subject at this moment, read by other code."""
    claims = json.loads(claims_text)
    audience = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
    good = claims["iss"] == NAME and AUDIENCE in audience and f"jwt:{claims['sub']}" == name
    return "" if good and claims["exp"] + 30 > NOW and claims.get("nbf", 0) <= NOW + 30 else f"the claims are {claims}"


def _wrong_bare(token: str) -> str:
    """Return why a token is not signed, checked without the authenticator's own code."""
    try:
        jwt.PyJWS(algorithms=["ES256"]).decode(token, KEY.public_key(), algorithms=["ES256"])
    except jwt.PyJWTError as error:
        return str(error)
    return ""
