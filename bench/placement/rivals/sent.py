"""What a router remembers of the prompts that it sent to one pod."""

from __future__ import annotations

import math
from collections import OrderedDict

from proxy.lab.workload import CHUNK, Job


class Sent:
    """At most `most` entries of `block` tokens. The prompt that was sent longest ago is forgotten first, from its
    beginning."""

    def __init__(self, block: int = 1, most: float = math.inf) -> None:
        self._block = block
        self._most = most
        self._held: OrderedDict[int, int] = OrderedDict()
        """Node -> tokens of its chunk."""
        self.entries = 0

    def matched(self, job: Job) -> int:
        """Tokens of the prompt's beginning, in whole entries; its last one may be part of a block, if exactly that part
        was sent."""
        tokens = 0
        for at, node in enumerate(job.nodes):
            own = min(CHUNK, job.prompt_tokens - at * CHUNK)
            held = self._held.get(node, 0)
            if held != own:
                return tokens + min(held, own) // self._block * self._block
            tokens += own
        return tokens

    def add(self, job: Job) -> int:
        """Returns the tokens that it had not been sent before."""
        new = 0
        for at, node in enumerate(job.nodes):
            own, held = min(CHUNK, job.prompt_tokens - at * CHUNK), self._held.get(node, 0)
            if own > held:
                self._held[node] = own
                self.entries += self._count(own) - self._count(held)
                new += own - held
            self._held.move_to_end(node)
        while self.entries > self._most:
            self.entries -= self._count(self._held.popitem(last=False)[1])
        return new

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._block)
