"""Warnings about configurations that are valid, but probably not intended."""

from __future__ import annotations

from pathlib import Path

from proxy.config.warnings import warnings
from proxy.settings import from_mapping

PODS = {"static": [{"url": "http://a:1"}]}


def test_files_required_for_the_start_are_checked(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    settings = from_mapping({"pods": PODS, "listen": {"tls": {"cert": str(cert)}}})
    (warning,) = warnings(settings)
    assert warning.startswith(f"listen.tls.cert: {cert} does not exist")
    cert.touch()
    assert list(warnings(settings)) == []


def test_queues_of_every_pool_are_checked() -> None:
    spare = {"pods": {"static": [{"url": "http://b:1"}]}, "flowControl": {"maxConcurrent": 1, "queueTimeout": "1h"}}
    settings = from_mapping({"pods": PODS, "flowControl": {"fairness": "strict"}, "pools": {"spare": spare}})
    assert [warning.partition(":")[0] for warning in warnings(settings)] == [
        "flowControl",
        "pools.spare.flowControl.queueTimeout",
    ]


def test_policies_of_the_autoscaler_are_checked() -> None:
    metrics = [{"name": "ttft", "kind": "value", "target": 1.0}]
    roles = [{"name": "vllm", "min": 1, "max": 4, "metrics": metrics}]
    settings = from_mapping({"pods": PODS, "autoscale": {"pools": {"default": {"mode": "active", "roles": roles}}}})
    assert [warning.partition(":")[0] for warning in warnings(settings)] == [
        "autoscale.pools.default.mode",
        "autoscale.pools.default.roles[0].metrics",
    ]


def test_numbers_whose_unit_was_probably_forgotten_are_named() -> None:
    forgotten = {"listen": {"maxBody": 16}, "reliability": {"timeouts": {"connect": 500}}}
    assert list(warnings(from_mapping({"pods": PODS, **forgotten}))) == [
        "listen.maxBody: 16 bytes are too few for most requests; a number without a unit is in bytes.",
        "reliability.timeouts.connect: 500 s are long for a connection; a number without a unit is in seconds.",
    ]
