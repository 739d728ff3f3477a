"""Actuators, which scale a role by a program, a webhook, Kubernetes or docker compose."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy import outbound
from proxy.autoscale.drains import Drains, Orders
from proxy.autoscale.loop import ScalingDecision, ScalingOutcome
from proxy.autoscale.settings import ActuatorSettings, path_of
from proxy.core.ports import Clock, Random
from proxy.kubernetes.api import open_session
from proxy.kubernetes.settings import ApiServer

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds of the pause after a failure. It doubles with every further failure, with a jitter of a quarter."""

CIRCUIT = 5
"""Number of consecutive failures after which the pause is the longest one."""


@dataclass(slots=True)
class _Role:
    went_up: float = -inf
    went_down: float = -inf
    failures: int = 0
    not_before: float = -inf

    def done(self, now: float, up: bool) -> None:
        self.failures, self.not_before = 0, -inf
        if up:
            self.went_up = now
        else:
            self.went_down = now


@dataclass(slots=True)
class GuardedActuator:
    """The actuator of the loop: it limits steps, drains pods and pauses after failures before it calls the scaler. An
    action that is not possible yet is BUSY: the loop tries again."""

    settings: ActuatorSettings
    scaler: Scaler
    drains: Drains
    orders: Orders
    clock: Clock
    random: Random
    is_leader: Callable[[], bool] = lambda: True
    """Whether this proxy holds the scaling lease."""
    roles: defaultdict[str, _Role] = field(default_factory=lambda: defaultdict(_Role))
    """Results of earlier orders by role."""

    async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
        if not self.is_leader():
            return ScalingOutcome.BUSY
        if self._is_stopped():
            await self.cancel(role)
            return ScalingOutcome.REFUSED
        current = decision.situations[role].current
        count = self._step(current, *decision.bounds[role], decision.desired[role])
        if count == 0 and not self.settings.allow_zero:
            return ScalingOutcome.REFUSED
        if count == current:
            return ScalingOutcome.OK
        if self._must_wait(self.roles[role], count > current):
            return ScalingOutcome.BUSY
        if count < current:
            return await self._down(decision, role, count)
        await self.cancel(role)
        return await self._act(ScaleOrder(decision, role, count))

    async def cancel(self, role: str) -> None:
        """Return draining pods to service, because no pod has to be removed."""
        if back := self.drains.cancel(role):
            log.info("autoscale: returned %s to service, because demand rose", ", ".join(back))
            await self.mark(back, doomed=False)

    async def mark(self, pods: list[str], doomed: bool) -> None:
        """Mark the pods that should be deleted first, or remove their marks. Without the mark the platform may delete
        another pod; the chosen pods are drained in any case. A process without the lease marks none: the leader clears
        the marks of the previous leader."""
        try:
            if pods and self.is_leader():
                await self.scaler.mark(pods, doomed)
        except Exception:
            log.warning("autoscale: failed to mark %s for deletion", ", ".join(pods), exc_info=True)

    async def _down(self, decision: ScalingDecision, role: str, count: int) -> ScalingOutcome:
        before = self.drains.names(role)
        victims = self.drains.start(role, count)
        await self.mark([one for one in before if one not in victims], doomed=False)
        await self.mark([one for one in victims if one not in before], doomed=True)
        if not self.drains.empty(role):
            return ScalingOutcome.BUSY
        self.drains.removal_ordered(role)
        outcome = await self._act(ScaleOrder(decision, role, count, tuple(victims)))
        if outcome is not ScalingOutcome.OK:
            self.drains.removal_over(role)
        return outcome

    async def _act(self, order: ScaleOrder) -> ScalingOutcome:
        if not self.is_leader():  # it was lost while pods were marked
            return ScalingOutcome.BUSY
        known, decision = self.roles[order.role], order.decision
        try:
            outcome = await self.scaler.scale(order)
        except BaseException:  # also if the loop cuts it off
            self._failed(known)
            raise
        if outcome is ScalingOutcome.OK:
            known.done(self.clock.now(), order.count > order.current)
            self.orders.put(order.role, order.count)
        elif outcome is ScalingOutcome.ERROR:
            self._failed(known)
        found = decision.recommendation
        why = ", ".join(reason.value for reason in found.result.reasons) if found else ""
        log.info(
            "autoscale: pool %s, role %s: %d -> %d: %s (decision %d%s)",
            *(decision.pool, order.role, order.current, order.count, outcome.value, decision.id, why and f": {why}"),
        )
        return outcome

    def _is_stopped(self) -> bool:
        return self.settings.kill_file is not None and Path(self.settings.kill_file).exists()

    def _failed(self, known: _Role) -> None:
        known.failures += 1
        pause = LONGEST_PAUSE if known.failures >= CIRCUIT else min(LONGEST_PAUSE, FIRST_PAUSE * 2**known.failures / 2)
        known.not_before = self.clock.now() + pause * (0.75 + self.random.random() / 2)

    def _must_wait(self, known: _Role, up: bool) -> bool:
        now = self.clock.now()
        too_soon = (
            now - known.went_up < self.settings.up_interval
            if up
            else now - known.went_down < self.settings.down_interval
        )
        return now < known.not_before or too_soon

    def _step(self, current: int, low: int, high: int, desired: int) -> int:
        """Return the next size towards the desired one, within the bounds and the largest step."""
        wanted, most = min(max(desired, low), high), self.settings.max_step or desired + current
        return min(max(wanted, current - most), current + most)


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """An order to scale `role` to `count` replicas. `victims` are the names of the pods to remove: they are empty."""

    decision: ScalingDecision
    role: str
    count: int
    victims: tuple[str, ...] = ()

    @property
    def current(self) -> int:
        return self.decision.situations[self.role].current

    @property
    def key(self) -> str:
        """A key that is the same for every retry of an order of the same decision."""
        return f"{self.decision.pool}/{self.role}/{self.decision.id}/{self.count}"

    def as_dict(self) -> dict[str, Any]:
        """Return the decision and this order, ready for JSON."""
        order = {"role": self.role, "current": self.current, "desired": self.count, "victims": list(self.victims)}
        return {**self.decision.as_dict(), "order": order}


class Scaler:
    """An actuator of one kind. It returns BUSY if an action is not possible yet, REFUSED if it is not allowed; any
    exception is an ERROR."""

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        """Execute the order. Do nothing if the role has the size already."""
        raise NotImplementedError

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        """Mark the pods as the next to be removed, or remove the mark. Do nothing where the platform ignores marks."""


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
DOOMED, SPARED = "-1000", "0"
"""Deletion costs. A ReplicaSet deletes the pods with the lowest cost first; StatefulSets ignore the cost."""

MERGE = {"content-type": "application/merge-patch+json"}

_CONFLICT, _TOO_MANY, _GONE = 409, 429, 404


@dataclass(frozen=True, slots=True)
class Kubernetes(Scaler):
    """The actuator for Kubernetes. `targets` by role: `deployment/NAME`, `statefulset/NAME`, or
    `GROUP/VERSION/RESOURCE/NAME` for any resource with a scale subresource. Needs `get` and `patch` on that, and
    `patch` on pods for the deletion cost."""

    targets: Mapping[str, str]
    timeout: float
    access: ApiServer

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        """Execute the order. If the resource has changed since it was read, try again later."""
        async with await open_session(self.access, self.timeout) as session:
            url = await self._url(order.role)
            status, scale = await _json(session, "GET", url)
            if status != 200:
                return _outcome_of_patch(status, url)
            if scale.get("spec", {}).get("replicas", 0) == order.count:
                return ScalingOutcome.OK
            version = scale.get("metadata", {}).get("resourceVersion")
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": order.count}}
            status, _ = await _json(session, "PATCH", url, patch)
            return _outcome_of_patch(status, url)

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        patch = {"metadata": {"annotations": {DELETION_COST: DOOMED if doomed else SPARED}}}
        root = f"{self.access.url}/api/v1/namespaces/{await self._namespace()}/pods"
        async with await open_session(self.access, self.timeout) as session:
            for pod in pods:
                status, _ = await _json(session, "PATCH", f"{root}/{pod.rpartition('/')[2]}", patch)
                if status >= 300 and (doomed or status != _GONE):
                    log.warning("failed to set the deletion cost of pod %s: the API server responded %d", pod, status)

    async def _url(self, role: str) -> str:
        group, name = path_of(self.targets[role])
        api, _, resource = group.rpartition("/")
        return f"{self.access.url}/apis/{api}/namespaces/{await self._namespace()}/{resource}/{name}/scale"

    async def _namespace(self) -> str:
        return await asyncio.to_thread(self.access.own_namespace)


async def _json(
    session: aiohttp.ClientSession, method: str, url: str, patch: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    headers = None if patch is None else MERGE
    response = await outbound.send(session, method, url, json=patch, headers=headers)
    content = orjson.loads(response.body) if response.body and response.status < 300 else None
    return response.status, content if isinstance(content, dict) else {}


def _outcome_of_patch(status: int, url: str) -> ScalingOutcome:
    if status < 300:
        return ScalingOutcome.OK
    if status in (_CONFLICT, _TOO_MANY):
        return ScalingOutcome.BUSY
    log.warning("%s: the API server responded %d", url, status)
    return ScalingOutcome.REFUSED if status in (401, 403, 404, 422) else ScalingOutcome.ERROR


TEMPORARILY = os.EX_TEMPFAIL

_PLACEHOLDER = re.compile(r"\{(pool|role|desired|current|victims)\}")


@dataclass(frozen=True, slots=True)
class Command(Scaler):
    """The actuator that runs a program. `{pool} {role} {desired} {current} {victims}` in an argument are replaced,
    victims separated by commas; the environment has the same values as AUTOSCALE_POOL etc., stdin the decision as JSON.
    Exit code 0 is ok, 75 (EX_TEMPFAIL) busy. A program that takes longer than `timeout` seconds is killed."""

    argv: Sequence[str]
    timeout: float

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        values = {
            "pool": order.decision.pool,
            "role": order.role,
            "desired": str(order.count),
            "current": str(order.current),
            "victims": ",".join(order.victims),
        }
        argv = [_PLACEHOLDER.sub(lambda found: values[found[1]], one) for one in self.argv]
        return await run(argv, self.timeout, orjson.dumps(order.as_dict()), values)


async def run(
    argv: Sequence[str], timeout: float, stdin: bytes = b"", values: Mapping[str, str] | None = None
) -> ScalingOutcome:
    """Run a program. Raise OSError if it does not exist."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **{f"AUTOSCALE_{name.upper()}": value for name, value in (values or {}).items()}},
    )
    try:
        async with asyncio.timeout(timeout):
            _, errors = await process.communicate(stdin)
    except BaseException:  # a timeout or a cancellation: the program must not stay
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == TEMPORARILY:
        return ScalingOutcome.BUSY
    if process.returncode:
        log.warning("%s ended with %d: %s", argv[0], process.returncode, errors.decode(errors="replace")[-500:].strip())
        return ScalingOutcome.ERROR
    return ScalingOutcome.OK


@dataclass(frozen=True, slots=True)
class Compose(Scaler):
    """The actuator for docker compose. On scale-down, compose removes the container with the highest number: drain with
    `policy: highest-ordinal`. `program` precedes `compose`."""

    services: Mapping[str, str]
    timeout: float
    project: str = ""
    directory: str = ""
    program: tuple[str, ...] = ("docker", "compose")

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        service = self.services[order.role]
        project = ("-p", self.project) if self.project else ()
        directory = ("--project-directory", self.directory) if self.directory else ()
        up = ("up", "-d", "--no-recreate", "--no-deps", "--scale", f"{service}={order.count}", service)
        return await run([*self.program, *project, *directory, *up], self.timeout)


@dataclass(frozen=True, slots=True)
class Webhook(Scaler):
    """The actuator that sends the order to a URL. `sent_at` in the body identifies old orders; `x-signature` is
    `sha256=` and the HMAC-SHA256 of the body in hex. Status 2xx is ok, 409 busy, other 4xx refused; any other result is
    an error."""

    url: str
    secret: str | None
    timeout: float
    wall: Callable[[], float]

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        body = orjson.dumps({**order.as_dict(), "sent_at": self.wall()})
        headers = {"content-type": "application/json", "idempotency-key": order.key}
        if self.secret is not None:
            headers["x-signature"] = "sha256=" + hmac.new(self.secret.encode(), body, hashlib.sha256).hexdigest()
        response = await outbound.fetch(
            "POST", self.url, self.timeout, data=body, headers=headers, allow_redirects=False
        )
        if 200 <= response.status < 300:
            return ScalingOutcome.OK
        if response.status == _CONFLICT:
            return ScalingOutcome.BUSY
        return ScalingOutcome.REFUSED if 400 <= response.status < 500 else ScalingOutcome.ERROR
