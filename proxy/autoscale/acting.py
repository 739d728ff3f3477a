"""The sections `actuator` and `drain` of a pool: who brings roles to their size, and how pods are emptied before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.core.params import camel, param
from proxy.core.units import Duration
from proxy.kubernetes.settings import SERVICE_ACCOUNT, Access

_NEEDS = {"webhook": ("url",), "exec": ("command",), "kubernetes": ("targets",), "compose": ("targets",)}
_TAKES = {
    "webhook": ("url", "secret"),
    "exec": ("command",),
    "kubernetes": ("targets", "namespace", "url", "token_file", "ca_file"),
    "compose": ("targets", "project", "directory"),
}
_OWN = ("url", "secret", "command", "targets", "namespace", "token_file", "ca_file", "project", "directory")
"""What means something to some types only."""

_BUILT_IN = {
    "deployment": "apps/v1/deployments",
    "statefulset": "apps/v1/statefulsets",
    "replicaset": "apps/v1/replicasets",
}


@dataclass(frozen=True, slots=True)
class ActuatorSettings:
    """Scales roles where `mode` is active."""

    type: Literal["webhook", "exec", "kubernetes", "compose"] = param(doc="how")
    roles: tuple[str, ...] = param((), "that it scales; those of `targets`, or all, unless given")
    url: str = param("", "webhook: where to send; kubernetes: the API server; that of the cluster unless given")
    secret: str | None = param(None, "webhook: key of the signature")
    command: tuple[str, ...] = param((), "exec: program and arguments; {pool} {role} {desired} {current} {victims}")
    targets: Mapping[str, str] = param(
        {}, "role -> kubernetes: deployment/NAME, statefulset/NAME or GROUP/VERSION/RESOURCE/NAME; compose: service"
    )
    namespace: str = param("", "kubernetes: of the targets; that of kvlane's own pod unless given")
    token_file: str = param("", "kubernetes: with the token; that of the service account unless given")
    ca_file: str = param("", "kubernetes: with the certificates to trust; that of the service account unless given")
    project: str = param("", "compose: name of the project")
    directory: str = param("", "compose: with the compose file")
    up_interval: Duration = param(Duration(30.0), "between two steps up of a role, at least")
    down_interval: Duration = param(Duration(300.0), "between two steps down of a role, at least")
    max_step: int = param(8, "replicas by which a role is changed at once, at most; 0: any number", at_least=0)
    timeout: Duration = param(Duration(10.0), "that a call may take", more_than=0)
    startup: Duration = param(Duration(600.0), "that replicas which were asked for may take to be seen", more_than=0)
    allow_zero: bool = param(False, "a role with min: 0 may lose its last replica")
    kill_file: str | None = param(None, "while this file exists nothing is scaled")

    def __post_init__(self) -> None:
        """Raises ValueError for what the type lacks, or has no use for."""
        for name in _NEEDS[self.type]:
            if not getattr(self, name):
                raise ValueError(f"type {self.type} needs {camel(name)}")
        for name in _OWN:
            if getattr(self, name) and name not in _TAKES[self.type]:
                raise ValueError(f"{camel(name)} means nothing to type {self.type}")
        if self.type == "kubernetes":
            _ = self.access
            for target in self.targets.values():
                path_of(target)

    @property
    def access(self) -> Access:
        """With the service account of the pod, whatever the server is. Raises ValueError for a `url` that is none."""
        token, authority = str(SERVICE_ACCOUNT / "token"), str(SERVICE_ACCOUNT / "ca.crt")
        return Access(self.url, self.namespace, self.token_file or token, self.ca_file or authority)

    def owned(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """Which of all roles it scales."""
        return self.roles or tuple(self.targets) or roles


def path_of(target: str) -> tuple[str, str]:
    """Of a target of Kubernetes: API group with its resource, and the name. Raises ValueError."""
    kind, _, name = target.rpartition("/")
    group = _BUILT_IN.get(kind.lower(), kind)
    if not name or group.count("/") != 2:
        raise ValueError(f"{target!r} is no target; write deployment/NAME or GROUP/VERSION/RESOURCE/NAME")
    return group, name


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """Pods that are to go get no new requests, and are taken away when their last one has ended."""

    policy: Literal["least-loss", "highest-ordinal", "newest"] = param(
        "least-loss", "who goes first; highest-ordinal is what StatefulSets and compose do anyway"
    )
    timeout: Mapping[str, Duration] = param(
        {}, "role -> longest wait for the last request; 300s for prefill, 900s for others unless given"
    )

    group_label: str = param(
        "modelserving.volcano.sh/group-name",
        "label with the name of the group of roles that a pod serves with; least-loss keeps the last pod of a role in "
        "each group as long as it can",
    )

    def patience(self, role: str) -> float:
        return self.timeout.get(role, Duration(300.0 if role == "prefill" else 900.0))
