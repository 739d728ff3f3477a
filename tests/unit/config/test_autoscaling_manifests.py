"""The manifests in config/deploy/autoscaling: they are what Kubernetes and KEDA read, and fit what kvlane serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy import __version__
from proxy.autoscale.settings import load, path_of
from proxy.http.admin_pods import LONGEST_WAIT
from proxy.telemetry.metrics import Catalogue

CONFIG = Path(__file__).parents[3] / "config"
FOLDER = CONFIG / "deploy" / "autoscaling"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


KINDS = {
    "rbac.yaml": ["v1/ServiceAccount", "rbac.authorization.k8s.io/v1/Role", "rbac.authorization.k8s.io/v1/RoleBinding"],
    "keda.yaml": ["keda.sh/v1alpha1/ScaledObject", "keda.sh/v1alpha1/TriggerAuthentication"],
    "hpa.yaml": ["autoscaling/v2/HorizontalPodAutoscaler"],
    "pods.yaml": ["apps/v1/Deployment"],
}


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_every_manifest_is_of_a_known_kind_and_in_one_namespace(file: Path) -> None:
    found = documents(file.name)
    assert [f"{one['apiVersion']}/{one['kind']}" for one in found] == KINDS[file.name]
    assert {one["metadata"]["namespace"] for one in found} == {"inference"}


def test_the_actuator_has_exactly_its_permissions() -> None:
    scale, pods = one("rbac.yaml", "Role")["rules"]
    policy = load(yaml.safe_load((CONFIG / "autoscale" / "prefill-decode.yaml").read_text())["autoscale"])
    actuator = policy.pools["default"].actuator
    assert actuator is not None
    targets = [path_of(target) for target in actuator.targets.values()]
    assert {f"{group.rpartition('/')[2]}/scale" for group, _ in targets} == set(scale["resources"])
    assert {name for _, name in targets} == set(scale["resourceNames"])
    assert scale["verbs"] == ["get", "patch"]
    assert (pods["resources"], pods["verbs"]) == (["pods"], ["patch"])
    binding = one("rbac.yaml", "RoleBinding")
    assert binding["roleRef"]["name"] == one("rbac.yaml", "Role")["metadata"]["name"]
    assert binding["subjects"][0]["name"] == one("rbac.yaml", "ServiceAccount")["metadata"]["name"]


def test_keda_reads_an_existing_value() -> None:
    scaled = one("keda.yaml", "ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["url"].endswith("/autoscale/pools/default")
    assert trigger["metadata"]["valueLocation"] == "roles.decode.desired"
    assert (trigger["metadata"]["targetValue"], trigger["metricType"]) == ("1", "AverageValue")
    assert trigger["authenticationRef"]["name"] == one("keda.yaml", "TriggerAuthentication")["metadata"]["name"]
    assert scaled["fallback"]["replicas"] >= scaled["minReplicaCount"]


@pytest.mark.parametrize(
    "behavior",
    [
        one("hpa.yaml", "HorizontalPodAutoscaler")["spec"]["behavior"],
        one("keda.yaml", "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
    ],
)
def test_nothing_is_damped_twice(behavior: dict[str, Any]) -> None:
    for direction in ("scaleUp", "scaleDown"):
        assert behavior[direction]["stabilizationWindowSeconds"] == 0
        assert behavior[direction]["tolerance"] == "0"


def test_the_metric_of_the_hpa_is_exposed() -> None:
    (metric,) = one("hpa.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in Catalogue(__version__).sample_names
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_a_stopping_pod_waits_no_longer_than_its_grace_period() -> None:
    spec = one("pods.yaml", "Deployment")["spec"]["template"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "/autoscale/drain/$POD_NAME?wait=600s" in command
    assert spec["terminationGracePeriodSeconds"] > 600 >= LONGEST_WAIT
