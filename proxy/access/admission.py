"""What a request of somebody known may ask for, whose it is, and that its tokens are counted."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.errors import UnknownModel
from proxy.core.identity import IDENTITY, Identity
from proxy.core.patterns import allows
from proxy.core.ports import Resolver
from proxy.core.request import InferenceRequest, changed
from proxy.openai.asked_usage import asking


class Admission:
    """Implements `core.ports.Resolver`, before the one of the models, if there is one."""

    def __init__(self, models: Resolver | None = None, counts_tokens: Callable[[Identity], bool] | None = None) -> None:
        """`counts_tokens` says whose pods are asked for usage; None: nobody's."""
        self._models = models
        self._counts_tokens = counts_tokens

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        """Raises UnknownModel for one that the key may not ask for: it does not learn what others may."""
        if identity is not None and not allows(identity.models, request.model):
            raise UnknownModel(request.model)
        if self._models is not None:
            request = self._models.resolve(request, identity)
        if identity is None:
            return request
        request.state.write(IDENTITY, identity)
        if request.tenant != identity.tenant:
            request = changed(request, tenant=identity.tenant)
        return asking(request) if self._counts_tokens is not None and self._counts_tokens(identity) else request
