"""The door: keys of the configuration and of a file that changes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.auth import authenticator
from proxy.auth.authenticator import Authenticator, authenticator_of
from proxy.auth.settings import ApiKey, AuthSettings, Limits, Tenant
from proxy.core.errors import ConfigError, Forbidden, Unauthorized
from proxy.core.params import load
from proxy.core.ports import ManualClock
from proxy.core.state import State
from tests.helpers.waiting import until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticator, "INTERVAL", 0.005)


async def nowhere(url: str) -> tuple[int, bytes]:
    raise AssertionError("no authentication is needed")


def new_authenticator(environ: dict[str, str] | None = None, **access: Any) -> Authenticator:
    made = authenticator_of(load(AuthSettings, access), ManualClock(), environ or {}, nowhere, State().draft())
    assert made is not None
    return made


def opens(authenticator: Authenticator, key: str) -> bool:
    try:
        return authenticator.find({"x-api-key": key}) is not None
    except Unauthorized:
        return False


def write(path: Path, text: str) -> None:
    """As a whole: a file that is written in place is seen half-written."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_without_keys_there_is_no_authentication() -> None:
    assert authenticator_of(AuthSettings(), ManualClock(), {}, nowhere, State().draft()) is None


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer a.b.c"}])
async def test_an_unknown_key_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        await new_authenticator(apiKeys=[{"name": "a", "key": "k"}]).authenticate(headers)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "An API key is needed"),
        ({"authorization": "Bearer "}, "An API key is needed"),
        ({"authorization": "k"}, "The Authorization header lacks the scheme Bearer"),
        ({"authorization": "Basic azprCg=="}, "The Authorization header lacks the scheme Bearer"),
    ],
)
async def test_a_missing_scheme_is_named(headers: dict[str, str], message: str) -> None:
    with pytest.raises(Unauthorized, match=message):
        await new_authenticator(apiKeys=[{"name": "a", "key": "k"}]).authenticate(headers)


async def test_a_key_has_its_scopes_only() -> None:
    keys = new_authenticator(apiKeys=[{"name": "ops", "key": "k", "scopes": ["admin"]}])
    assert (await keys.authenticate({"api-key": "k"}, "admin")).name == "ops"
    with pytest.raises(Forbidden):
        await keys.authenticate({"api-key": "k"})


def test_tokens_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(sys.modules, "proxy.auth.jwt_tokens", raising=False)
    with pytest.raises(ConfigError, match=r"security.jwt: needs the extra: .*pip install .*'kvlane\[jwt\]'"):
        new_authenticator(jwt={"jwks": "keys.json", "issuer": "i", "audience": ["a"]})


def test_an_empty_list_refuses_all(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[]")
    assert not opens(new_authenticator(apiKeysFile=str(tmp_path / "keys.yaml")), "k")


def test_a_file_resolves_keys_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("- {name: a, key: '${A_KEY}'}")
    assert opens(new_authenticator({"A_KEY": "k"}, apiKeysFile=str(tmp_path / "keys.yaml")), "k")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- {name: a}", r"keys.yaml\[0\]: the key 'a' needs a key or a hash"),
        ("- {name: a, kye: k}", "did you mean 'key'"),
        ("a: b", "must be a list"),
        ("", r"keys.yaml: is empty; write \[\] for no keys"),
        ("- {name: a, key: 2030-02-30}", "keys.yaml:1:18: '2030-02-30' cannot be read as timestamp"),
        ("- {", "keys.yaml:"),
        ("- {name: fixed, key: k}", "two are named 'fixed'"),
        ("- {name: a, key: fixed}", "'fixed' and 'a' are the same key"),
        ("- {name: a, key: k, limits: large}", "the limits 'large'"),
        ("- {name: a, key: '${MISSING}'}", "MISSING is not set"),
    ],
)
def test_a_faulty_file_prevents_the_start(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        new_authenticator(apiKeys=[{"name": "fixed", "key": "fixed"}], apiKeysFile=str(tmp_path / "keys.yaml"))


def test_a_missing_file_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^security.apiKeysFile: .*/keys.yaml: cannot be read"):
        new_authenticator(apiKeysFile=str(tmp_path / "keys.yaml"))


async def test_a_changed_file_changes_the_accepted_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: old}")
    async with new_authenticator(apiKeys=[{"name": "fixed", "key": "fixed"}], apiKeysFile=str(file)) as keys:
        assert opens(keys, "old")
        write(file, "- {name: a, key: new, limits: {requestsPerMinute: 5}}")
        await until(lambda: opens(keys, "new"))
        assert not opens(keys, "old")
        assert opens(keys, "fixed")
        identity = keys.find({"x-api-key": "new"})
        assert identity is not None
        assert keys.limits[identity.limits] == Limits(requests_per_minute=5)


@pytest.mark.parametrize("broken", ["", "- {name: a, key: [}", "- {name: fixed, key: new}", "- {key: new}"])
async def test_a_file_that_becomes_faulty_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: old, limits: {requestsPerMinute: 5}}")
    async with new_authenticator(apiKeys=[{"name": "fixed", "key": "fixed"}], apiKeysFile=str(file)) as keys:
        with caplog.at_level(logging.ERROR):
            write(file, broken)
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(0.05)
        assert len(caplog.records) == 1
        assert opens(keys, "old")
        assert list(keys.limits.values()) == [Limits(requests_per_minute=5)]
        file.unlink()
        await until(lambda: len(caplog.records) == 2)
        assert opens(keys, "old")
        write(file, "- {name: a, key: new}")
        await until(lambda: opens(keys, "new"))


def test_tenants_have_named_limits_or_their_own() -> None:
    keys = new_authenticator(
        apiKeys=[{"name": "a", "key": "k"}],
        limits={"small": {"requestsPerMinute": 1}},
        tenants={"acme": {"limits": "small"}, "big": {"limits": {"requestsPerMinute": 9}}, "*": {}},
    )
    tenants = keys.tenants
    assert keys.limits[tenants["acme"]] == Limits(requests_per_minute=1)
    assert keys.limits[tenants["big"]] == Limits(requests_per_minute=9)
    assert tenants["*"] == ""


def test_named_limits_may_have_the_names_of_places_that_have_limits_of_their_own() -> None:
    pytest.importorskip("jwt", reason="needs the extra: pip install 'kvlane[jwt]'")
    token = {"jwks": "keys.json", "issuer": "i", "audience": ["a"]}
    keys = new_authenticator(
        apiKeys=[
            {"name": "a", "key": "ka", "limits": "jwt"},
            {"name": "b", "key": "kb", "limits": "apiKeys.c"},
            {"name": "c", "key": "kc", "limits": {"requestsPerMinute": 3}},
        ],
        jwt={**token, "limits": {"requestsPerMinute": 4}},
        limits={"jwt": {"requestsPerMinute": 1}, "apiKeys.c": {"requestsPerMinute": 2}},
    )
    found = [keys.find({"x-api-key": f"k{name}"}) for name in "abc"]
    assert [one and keys.limits[one.limits].requests_per_minute for one in found] == [1, 2, 3]
    assert keys.tokens is not None
    assert keys.limits[keys.tokens._limits] == Limits(requests_per_minute=4)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"api_keys": (ApiKey("a", key="k"), ApiKey("a", key="l"))}, "two are named 'a'"),
        ({"api_keys": (ApiKey("a", key="k", limits="x"),)}, "'a' has the limits 'x'"),
        ({"api_keys": (ApiKey("a", key="k"),), "tenants": {"t": Tenant("x")}}, "tenants.t.limits: has the limits 'x'"),
        ({"tenants": {"t": Tenant(None)}}, "limits apply to keys and tenants only"),
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        AuthSettings(**fields)
