"""What a pod's connection asks of whoever gets its answers."""

from __future__ import annotations

from typing import Protocol

from proxy.core.errors import UpstreamFailed
from proxy.http.head import AnswerHead


class Receiver(Protocol):
    """Who gets an answer: its head, then what was read of its body, framing and all, the last by `finished`; or, at any
    point, `failed`. The connection's meter has what the parser made of it."""

    head: AnswerHead | None
    reads_head: bool
    """Whether `begin` gets the head of a simple answer too."""

    def begin(self, head: AnswerHead) -> None:
        """Of an answer that is not simple. Raises UpstreamFailed if it cannot be relayed."""

    def received(self, raw: bytes) -> None:
        """It may put another function in its place: `Connection.receive`."""

    def finished(self, raw: bytes, exact: bool) -> None:
        """`exact` says that nothing else follows in `raw`. It leaves the meter settled."""

    def upgraded(self, rest: bytes) -> None:
        """From here on the connection belongs to whoever calls `Connection.splice`."""

    def failed(self, error: UpstreamFailed) -> None: ...

    def broke(self, error: Exception) -> None:
        """One of these methods raised an error, which is a defect of the proxy; the connection is closed."""

    def pause_writing(self) -> None:
        """The pod does not keep up with the request's body."""

    def resume_writing(self) -> None: ...
