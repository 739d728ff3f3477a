"""Scales services of docker compose."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.autoscale.actuators.command import run
from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.loop import Outcome


class Compose(Hand):
    """Which container goes on the way down is for compose to say, the one with the highest number: drain with `policy:
    highest-ordinal`. `program` stands before `compose`."""

    def __init__(
        self,
        services: Mapping[str, str],
        timeout: float,
        project: str = "",
        directory: str = "",
        program: tuple[str, ...] = ("docker", "compose"),
    ) -> None:
        self._services = services
        self._timeout = timeout
        self._head = (
            *program,
            *(("-p", project) if project else ()),
            *(("--project-directory", directory) if directory else ()),
        )

    async def scale(self, order: Order) -> Outcome:
        service = self._services[order.role]
        argv = [*self._head, "up", "-d", "--no-recreate", "--no-deps", "--scale", f"{service}={order.count}", service]
        return await run(argv, self._timeout)
