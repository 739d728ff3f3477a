"""What pages of other sites may ask: the answers that browsers want to hear before they let them."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from proxy.http.call import HttpCall
from proxy.http.head import encode_pairs

ANY = "*"
MAX_AGE = "600"
"""Seconds that a browser need not ask again."""

EXPOSED = "x-request-id, x-kvlane-endpoint, x-kvlane-reason, retry-after"
"""Fields of answers that a page may read beside the usual ones."""

Serve = Callable[[HttpCall], Coroutine[Any, Any, None]]

_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


class Cors:
    """Stands before `serve`, where origins are configured. Browsers ask without a key, so a question is answered before
    one is looked for. No cookie is ever allowed: keys come in headers."""

    def __init__(self, origins: Sequence[str], serve: Serve, done: Callable[[HttpCall], None]) -> None:
        """`done` ends a call that was answered here."""
        self._any = ANY in origins
        self._origins = frozenset(origins)
        self._serve = serve
        self._done = done

    def serve(self, call: HttpCall) -> Coroutine[Any, Any, None]:
        origin = call.headers.get("origin")
        if origin is None or not (self._any or origin in self._origins):
            return self._serve(call)
        allowed = [("access-control-allow-origin", ANY)] if self._any else [("access-control-allow-origin", origin)]
        if not self._any:
            allowed.append(("vary", "origin"))
        call.answer_lines = encode_pairs([*allowed, ("access-control-expose-headers", EXPOSED)])
        if call.method == "OPTIONS" and "access-control-request-method" in call.headers:
            return self._permit(call)
        return self._serve(call)

    async def _permit(self, call: HttpCall) -> None:
        wanted = call.headers.get("access-control-request-headers", "")
        fields = [("access-control-allow-methods", "GET, POST, DELETE"), ("access-control-max-age", MAX_AGE)]
        if _NAMES.fullmatch(wanted):
            fields.append(("access-control-allow-headers", wanted))
        call.answer(200, fields, b"")
        self._done(call)
