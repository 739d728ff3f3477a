"""What is kept of an event until its batch is counted and logged: a few values, so that no body outlives its request.

The observer puts them together where it is told of the event: a function for each kind took 400 instructions more.

decision: (the pod that was chosen, seconds that it took)
first byte: (status, first_byte_at, received_at, model, stream)
leg: (pod, ending, attempt, predicted_cached_tokens, tokens of the prompt, status, model, its answer)
answer: (stream, usage, chunks, first_byte_at, last_byte_at)
request: (the call, when it ended, status, outcome, bytes of an answer of our own, the leg that answered or failed last)
call: (id, method, path, received_at, identity)
leg of a request: (model, name of the pod, first_byte_at, usage, bytes, attempt)
"""

from __future__ import annotations

from typing import Any

Record = tuple[Any, ...]

NO_LEG: Record = (None, None, None, None, 0, -1)
"""Of a request for which no pod was asked."""
