"""The manifests in config/deploy/kubernetes: they render, are what Kubernetes reads, and fit what kvlane does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.app import App
from proxy.cli.serve import serve
from proxy.config.load import from_text
from proxy.fleet.discovery.kubernetes import PODS, POOLS, SLICES
from proxy.settings import Settings

FOLDER = Path(__file__).parents[3] / "config" / "deploy" / "kubernetes"
VERSION = "1.34"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

each_stack = pytest.mark.parametrize("stack", ["base", "overlays/inferencepool", "overlays/gateway", "overlays/ha"])

KINDS = {
    "v1/ConfigMap",
    "v1/Service",
    "v1/ServiceAccount",
    "apps/v1/Deployment",
    "autoscaling/v2/HorizontalPodAutoscaler",
    "networking.k8s.io/v1/NetworkPolicy",
    "policy/v1/PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1/Role",
    "rbac.authorization.k8s.io/v1/RoleBinding",
}
MONITOR = "monitoring.coreos.com/v1/ServiceMonitor"

Object = dict[str, Any]


@cache
def rendered(stack: str) -> list[Object]:
    command = ["kubectl", "kustomize", str(FOLDER / stack)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def kind(item: Object) -> str:
    return f"{item['apiVersion']}/{item['kind']}"


def one(stack: str, name: str, *, called: str = "kvlane") -> Object:
    (found,) = [item for item in rendered(stack) if item["kind"] == name and item["metadata"]["name"] == called]
    return found


def template(stack: str, called: str = "kvlane") -> Object:
    found: Object = one(stack, "Deployment", called=called)["spec"]["template"]
    return found


def settings(stack: str) -> Settings:
    """Of the file and the options of the command."""
    (text,) = [item["data"]["kvlane.yaml"] for item in rendered(stack) if item["kind"] == "ConfigMap"]
    given = from_text(text, Path("kvlane.yaml"), {"KVLANE_ADMIN_KEY": "of-a-secret"})
    (container,) = template(stack)["spec"]["containers"]
    options = serve.make_context("serve", container["args"][1:], resilient_parsing=True).params
    return replace(given, extproc=replace(given.extproc, port=options["extproc_port"]))


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


@each_stack
def test_it_renders_to_known_kinds_once_each(stack: str) -> None:
    found = [(kind(item), item["metadata"]["name"]) for item in rendered(stack)]
    assert len(set(found)) == len(found)
    assert {each for each, _ in found} == KINDS | ({MONITOR} if stack == "overlays/ha" else set())


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="needs the package kubernetes-validate")
@each_stack
def test_every_object_fits_its_schema(stack: str) -> None:
    validate = import_module("kubernetes_validate").validate
    for item in rendered(stack):
        if kind(item) != MONITOR:
            validate(item, VERSION, strict=True)


@each_stack
def test_label_selectors_match_labels_of_pods(stack: str) -> None:
    pods = [item["spec"]["template"]["metadata"]["labels"] for item in rendered(stack) if item["kind"] == "Deployment"]
    for item in rendered(stack):
        spec = item.get("spec", {})
        selectors = {
            "Deployment": [spec.get("selector", {}).get("matchLabels")],
            "PodDisruptionBudget": [spec.get("selector", {}).get("matchLabels")],
            "NetworkPolicy": [spec.get("podSelector", {}).get("matchLabels")],
            "Service": [spec.get("selector")],
        }.get(item["kind"], [])
        for selector in selectors:
            assert len([labels for labels in pods if selects(selector, labels)]) == 1, item["metadata"]["name"]


@each_stack
def test_referenced_ports_configurations_and_accounts_exist(stack: str) -> None:
    pod, config = template(stack)["spec"], settings(stack)
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    gateways = {} if config.extproc.port is None else {"extproc": config.extproc.port}
    assert ports == {"http": config.listen.port, "admin": config.admin.port, **gateways}
    for name in ("kvlane", "kvlane-admin"):
        assert {port["targetPort"] for port in one(stack, "Service", called=name)["spec"]["ports"]} <= ports.keys()
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")} == {
        "admin"
    }
    mapped = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert mapped == {item["metadata"]["name"] for item in rendered(stack) if item["kind"] == "ConfigMap"}
    binding = one(stack, "RoleBinding")
    assert pod["serviceAccountName"] == one(stack, "ServiceAccount")["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [pod["serviceAccountName"]]
    assert binding["roleRef"]["name"] == one(stack, "Role")["metadata"]["name"]
    assert one(stack, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "kvlane"


@each_stack
def test_the_configuration_serves_and_has_time_to_drain(stack: str) -> None:
    config = settings(stack)
    App(config)
    assert config.listen.host == config.admin.host == "0.0.0.0"
    drain = config.reliability.drain
    assert drain.settle + drain.grace < template(stack)["spec"]["terminationGracePeriodSeconds"]


@each_stack
def test_the_role_grants_exactly_what_the_configuration_needs(stack: str) -> None:
    rules = one(stack, "Role")["rules"]
    assert {(*rule["apiGroups"], name) for rule in rules for name in rule["resources"]} == set(
        requested(settings(stack))
    )
    assert {tuple(rule["verbs"]) for rule in rules} == {("list", "watch")}


def requested(config: Settings) -> Iterator[tuple[str, str]]:
    """Group and resource of all that is listed and watched."""
    pods, models = config.pods.kubernetes, config.models.kubernetes
    assert pods is not None
    wanted = ((PODS, pods.selector or pods.inference_pool), (SLICES, pods.service), (POOLS, pods.inference_pool))
    yield from ((resource.group, resource.name) for resource, is_wanted in wanted if is_wanted)
    if models is not None:
        yield from ((models.group, name) for name in ("inferenceobjectives", "inferencemodelrewrites"))


@each_stack
def test_the_network_policy_permits_what_kvlane_needs(stack: str) -> None:
    policy = one(stack, "NetworkPolicy")["spec"]
    config = settings(stack)
    opened = [port for port in (config.listen.port, config.admin.port, config.extproc.port) if port is not None]
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": port, "protocol": "TCP"}] for port in opened]
    assert [rule.get("from") is None for rule in policy["ingress"]] == [port == config.listen.port for port in opened]
    peers = [to["podSelector"]["matchLabels"] for rule in policy["egress"] for to in rule.get("to", ())]
    assert {"app": "vllm"} in peers
    open_ports = {port["port"] for rule in policy["egress"] if "to" not in rule for port in rule["ports"]}
    assert open_ports == {53, 443, 6443}
    if stack == "overlays/ha":
        assert any(selects(peer, template(stack, "kvlane-redis")["metadata"]["labels"]) for peer in peers)


@each_stack
def test_containers_have_minimal_privileges(stack: str) -> None:
    for item in rendered(stack):
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            for container in pod["containers"]:
                context = container["securityContext"]
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["readOnlyRootFilesystem"]
                assert not context["allowPrivilegeEscalation"]
                assert "memory" in container["resources"]["limits"]


def test_with_a_store_several_replicas_share_state() -> None:
    config = settings("overlays/ha")
    store = one("overlays/ha", "Service", called="kvlane-redis")
    assert config.replicas.store == f"redis://{store['metadata']['name']}:{store['spec']['ports'][0]['port']}/0"
    assert one("overlays/ha", "HorizontalPodAutoscaler")["spec"]["minReplicas"] > 1
    for stack in ("base", "overlays/inferencepool", "overlays/gateway"):
        assert not settings(stack).replicas.is_shared
        assert one(stack, "HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 1


def test_a_gateway_finds_its_picker_and_its_protocol() -> None:
    config = settings("overlays/gateway")
    ports = {port["port"]: port for port in one("overlays/gateway", "Service")["spec"]["ports"]}
    assert config.extproc.port in ports
    assert ports[config.extproc.port]["appProtocol"] == "kubernetes.io/h2c"
    assert config.extproc.tls is None


@each_stack
def test_the_image_has_the_extras_that_the_configuration_needs(stack: str) -> None:
    config = settings(stack)
    needed = [("extproc", config.extproc.is_on), ("redis", config.replicas.is_shared)]
    (tag,) = [extra for extra, is_needed in needed if is_needed] or ["latest"]
    assert template(stack)["spec"]["containers"][0]["image"] == f"kvlane:{tag}"


def test_prometheus_finds_the_admin_port() -> None:
    monitor = one("overlays/ha", "ServiceMonitor")["spec"]
    service = one("overlays/ha", "Service", called="kvlane-admin")
    assert selects(monitor["selector"]["matchLabels"], service["metadata"]["labels"])
    assert [port["name"] for port in service["spec"]["ports"]] == [each["port"] for each in monitor["endpoints"]]
