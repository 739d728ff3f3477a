"""Remember which pod has encoded which image, audio or video, so that its encoder need not run again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, EndpointRemoved, PreRequest, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.openai.prompts import media_in

DEFAULT_MIB = 4096

MIB_PER_MEDIUM = 2
"""Assumed size of the embeddings of one medium."""

Seen = OrderedDict[str, None]
"""Digests of media, the least recently sent first."""


class MediaMatch:
    """The distinct media of a request, and the pods that have encoded them at the moment of the call."""

    __slots__ = ("_seen", "media")

    def __init__(self, media: frozenset[str], seen: Mapping[Endpoint, Seen]) -> None:
        self.media = media
        self._seen = seen

    def shares(self, endpoints: Sequence[Endpoint]) -> list[float]:
        """Return the share of the media that each endpoint has seen."""
        media, seen = self.media, self._seen
        held = [seen.get(endpoint) for endpoint in endpoints]
        return [0.0 if one is None else sum(map(one.__contains__, media)) / len(media) for one in held]


ENCODER_CACHE_MATCH: DataKey[MediaMatch] = DataKey("EncoderCacheMatchInfo", value_type=MediaMatch)


@plugin("mm-embeddings-cache-producer")
@dataclass
class MmEmbeddingsCacheProducer(DataProducer, PreRequest, EndpointRemoved):
    """Remembers which pods have encoded which images, audio and videos, identified by URL or content. A decode pod
    whose prompt another pod has prefilled encodes nothing and is not remembered."""

    waits: ClassVar[bool] = False

    name: InstanceName
    state: PluginState
    cache_size_in_mb_per_server: int = param(
        DEFAULT_MIB,
        "size of a pod's cache of embeddings in MiB, with 2 MiB per medium; 0 or less: the default",
        key="cacheSizeInMBPerServer",
        aliases=("cacheSizeInMB",),
    )

    def __post_init__(self) -> None:
        size = self.cache_size_in_mb_per_server if self.cache_size_in_mb_per_server > 0 else DEFAULT_MIB
        self._most = max(1, size // MIB_PER_MEDIUM)
        self._key = ENCODER_CACHE_MATCH.of(self.name)
        self._seen: dict[Endpoint, Seen] = self.state.get("seen", dict)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        media = media_in(request.body)
        if media:
            request.state.write(self._key, MediaMatch(media, self._seen))

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        match = attempt.request.state.read(self._key)
        if match is None or attempt.stage is Stage.DECODE:
            return
        seen = self._seen.setdefault(endpoint, OrderedDict())
        for medium in match.media:
            seen[medium] = None
            seen.move_to_end(medium)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._seen.pop(endpoint, None)
