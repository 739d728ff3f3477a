"""Warnings about configurations that are valid, but probably not intended."""

from __future__ import annotations

from pathlib import Path

from proxy.config.load import from_text
from proxy.config.warnings import unusable, warnings
from proxy.core.endpoint import DECODING, PREFILLING
from proxy.disagg.settings import ROLES
from proxy.plugins.filters.encode import ENCODING
from proxy.settings import from_mapping
from tests.helpers.http.authority import self_signed

PODS = {"static": [{"url": "http://a:1"}]}


def test_an_environment_variable_without_braces_is_a_warning_that_does_not_repeat_the_value() -> None:
    settings = from_mapping({"pods": PODS, "listen": {"host": "$HOST"}, "admin": {"apiKey": "$KEY"}})
    assert list(warnings(settings)) == [
        f"{path}: is not expanded: an environment variable is written with braces, ${{NAME}}."
        for path in ("listen.host", "admin.apiKey")
    ]


def test_a_dollar_that_is_written_twice_or_in_a_variable_is_no_warning() -> None:
    text = "pods: {static: [{url: http://a:1}]}\nlisten: {host: $$HOST}\nadmin: {apiKey: '${KEY}'}\n"
    assert list(warnings(from_text(text, Path("kvlane.yaml"), {"KEY": "$SECRET"}))) == []


def test_files_required_for_the_start_are_checked(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    settings = from_mapping({"pods": PODS, "listen": {"tls": {"cert": str(cert)}}})
    (warning,) = warnings(settings)
    assert warning.startswith(f"listen.tls.cert: {cert} does not exist")
    cert.touch()
    assert list(warnings(settings)) == []


def test_every_setting_that_names_a_missing_file_is_named(tmp_path: Path) -> None:
    gone, folder = str(tmp_path / "gone"), tmp_path / "none"
    settings = from_mapping(
        {
            "pods": {"static": [{"url": "https://a:1", "tls": {"ca": gone}}], "file": gone},
            "security": {"jwt": {"jwks": gone, "issuer": "i", "audience": ["a"]}},
            "telemetry": {"record": {"file": str(folder / "record")}},
        }
    )
    assert list(warnings(settings)) == [
        f"pods.static[0].tls.ca: {gone} does not exist; connections that need it fail.",
        f"pods.file: {gone} does not exist; it provides no pods until it does.",
        f"security.jwt.jwks: {gone} does not exist; connections that need it fail.",
        f"telemetry.record.file: the folder {folder} does not exist; nothing is recorded.",
    ]


def test_paths_that_cannot_be_files_are_named_with_the_reason(tmp_path: Path) -> None:
    file, long = tmp_path / "file", tmp_path / ("x" * 300)
    file.touch()
    settings = from_mapping(
        {
            "pods": {"static": [{"url": "https://a:1", "tls": {"ca": str(long)}}], "file": str(tmp_path)},
            "telemetry": {"record": {"file": str(file / "record")}},
        }
    )
    assert list(warnings(settings)) == [
        f"pods.static[0].tls.ca: {long} cannot be read: File name too long; connections that need it fail.",
        f"pods.file: {tmp_path} is a folder, not a file; it provides no pods until it does.",
        f"telemetry.record.file: the folder {file} is a file, not a folder; nothing is recorded.",
    ]


def test_a_missing_file_of_pods_that_a_plugin_names_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    discovery = {
        "plugins": [{"type": "file-discovery", "parameters": {"path": gone}}],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }
    settings = from_mapping({"pools": {"spare": {"scheduling": discovery}}, "scheduling": discovery})
    assert list(warnings(settings)) == [
        f"{path}pods.file: {gone} does not exist; it provides no pods until it does." for path in ("", "pools.spare.")
    ]


def test_an_unknown_role_of_a_pod_or_source_is_named() -> None:
    pods = {"static": [{"url": "http://a:1", "role": "prefil"}, {"url": "http://b:1", "role": "decode"}]}
    labelled = {"static": [{"url": "http://c:1", "labels": {"llm-d.ai/role": "prefil"}}]}
    own = {"dns": {"name": "d", "port": 1, "role": "large"}}
    settings = from_mapping({"pods": pods, "pools": {"labelled": {"pods": labelled}, "own": {"pods": own}}})
    known = "prefill, decode, encode, both, prefill-decode, encode-prefill, encode-prefill-decode"
    assert [warning for warning in warnings(settings) if ".role" in warning] == [
        f"pods.static[0].role: 'prefil' is not one of {known}; did you mean 'prefill'?",
        f"pools.own.pods.dns.role: 'large' is not one of {known}",
    ]


def test_a_role_that_the_autoscaler_scales_is_known() -> None:
    pods = {"static": [{"url": "http://a:1", "role": "large"}, {"url": "http://b:1", "role": "larg"}]}
    roles = [{"name": "large", "min": 1, "max": 1}]
    settings = from_mapping({"pods": pods, "autoscale": {"pools": {"default": {"roles": roles}}}})
    known = ", ".join((*ROLES, "large"))
    assert [warning for warning in warnings(settings) if ".role" in warning] == [
        f"pods.static[1].role: 'larg' is not one of {known}; did you mean 'large'?"
    ]


def test_a_fallback_to_an_unknown_pool_is_named() -> None:
    settings = from_mapping(
        {
            "pods": PODS,
            "pools": {"spare": {"pods": {"static": [{"url": "http://b:1"}]}}},
            "models": {"fallbacks": {"m": ["m@spare", "other@spar", "@x"]}},
        }
    )
    assert list(warnings(settings)) == [
        "models.fallbacks.m[1]: there is no pool 'spar', so 'other@spar' is the name of a model; did you mean 'spare'?"
    ]


def test_every_role_of_a_filter_is_known() -> None:
    assert set(ROLES) == (DECODING | PREFILLING | ENCODING) - {""}


def test_a_pool_without_settings_and_a_pool_named_by_a_number_have_usable_files() -> None:
    assert list(unusable(from_mapping({"pods": PODS, "pools": {"none": None, 1: {}}}))) == []


def test_tls_files_that_exist_must_be_usable(tmp_path: Path) -> None:
    text, other = tmp_path / "text.pem", self_signed(tmp_path / "other.pem")
    text.write_text("no PEM")
    own = self_signed(tmp_path / "own.pem")
    missing = {"cert": str(tmp_path / "none.pem"), "key": str(text)}
    spare = {"pods": {"static": [{"url": "https://b:1"}, {"url": "https://c:1", "tls": {"ca": str(text)}}]}}
    settings = from_mapping(
        {
            "pods": {**PODS, "tls": {"cert": str(own), "key": str(text)}},
            "listen": {"tls": {"cert": str(own), "key": str(other)}},
            "admin": {"tls": {"cert": str(own), "clientCa": str(text)}},
            "extproc": {"tls": missing},
            "pools": {"spare": spare},
        }
    )
    assert list(map(str, unusable(settings))) == [
        f"listen.tls.key: {other} cannot be used with the certificate in {own}: key values mismatch",
        f"admin.tls.clientCa: {text} holds no certificate in PEM format: no certificate or crl found",
        f"pods.tls.key: {text} holds no private key in PEM format",
        f"pools.spare.pods.static[1].tls.ca: {text} holds no certificate in PEM format: no certificate or crl found",
    ]


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
