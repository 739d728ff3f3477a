"""An issuer of tokens: makes keys, signs, and publishes the public halves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "kvlane"
NAME = "https://issuer.example"


class Issuer:
    """`time` is seconds since the Unix epoch; `keys` are what it publishes."""

    def __init__(self, time: float = 1_700_000_000.0) -> None:
        self.time = time
        self.private: dict[str, tuple[str, Any]] = {}
        self.keys: list[dict[str, Any]] = []
        self.requests = 0
        self.status = 200

    def rotate(self, kid: str, algorithm: str = "RS256", *, keep: bool = False, **more: Any) -> None:
        """A new pair of keys; the old ones are published no more, unless they are to be kept."""
        key: Any
        if algorithm.startswith(("RS", "PS")):
            key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        elif algorithm == "EdDSA":
            key = Ed25519PrivateKey.generate()
            public = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        self.private[kid] = algorithm, key
        self.keys = [*(self.keys if keep else []), {**public, "kid": kid, **more}]

    def token(self, kid: str, **claims: Any) -> str:
        """Good for an hour; a claim that is None is left out."""
        algorithm, key = self.private[kid]
        fields = {"iss": NAME, "aud": AUDIENCE, "sub": "alice", "exp": self.time + 3600, **claims}
        payload = {name: value for name, value in fields.items() if value is not None}
        token: str = jwt.encode(payload, key, algorithm, headers={"kid": kid})
        return token

    def published(self) -> bytes:
        return orjson.dumps({"keys": self.keys})

    async def fetch(self, url: str) -> tuple[int, bytes]:
        self.requests += 1
        return self.status, self.published()


@asynccontextmanager
async def served(issuer: Issuer) -> AsyncIterator[str]:
    """The URL of its keys."""

    async def respond(request: web.Request) -> web.Response:
        issuer.requests += 1
        return web.Response(status=issuer.status, body=issuer.published())

    app = web.Application()
    app.router.add_get("/keys", respond)
    async with TestServer(app) as server:
        yield str(server.make_url("/keys"))
