"""POSTs the decision to whoever scales, signed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import orjson

from proxy import outbound
from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.loop import Outcome

CONFLICT = 409


class Webhook(Hand):
    """The body has its time in it (`sent_at`), so that an old one can be told; `x-signature` is `sha256=` and the
    HMAC-SHA256 of the body in hex. 2xx is taken, 409 busy, other 4xx refused; all else is an error."""

    def __init__(self, url: str, secret: str | None, timeout: float, wall: Callable[[], float]) -> None:
        self._url = url
        self._secret = secret
        self._timeout = timeout
        self._wall = wall

    async def scale(self, order: Order) -> Outcome:
        body = orjson.dumps({**order.as_dict(), "sent_at": self._wall()})
        headers = {"content-type": "application/json", "idempotency-key": order.key}
        if self._secret is not None:
            headers["x-signature"] = signature(self._secret, body)
        response = await outbound.fetch(
            "POST", self._url, self._timeout, data=body, headers=headers, allow_redirects=False
        )
        return _outcome(response.status)


def signature(secret: str, body: bytes) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def _outcome(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.OK
    if status == CONFLICT:
        return Outcome.BUSY
    return Outcome.REFUSED if 400 <= status < 500 else Outcome.ERROR
