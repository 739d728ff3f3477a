"""Where pods come from while the program runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.core.errors import ConfigError
from proxy.fleet.discovery.dns import DnsSource, system_lookup
from proxy.fleet.discovery.file import FileSource, parse_pods
from proxy.fleet.settings import DnsSettings, PodSettings

OURS = "- {url: 'http://a:8000', name: a, role: decode, labels: {x: y}, weight: 2, models: [m], engine: sglang}\n"


def test_entries_are_those_of_the_static_list() -> None:
    assert parse_pods(OURS) == (
        PodSettings("http://a:8000", "a", role="decode", labels={"x": "y"}, weight=2.0, models=("m",), engine="sglang"),
    )


def test_entries_of_llm_d_are_read_with_host_names_and_ipv6_addresses() -> None:
    text = """
- {name: p0, namespace: default, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: prefill}}
- {name: p1, namespace: team, address: vllm.example, port: 8001}
- {name: p2, address: "fd00::1", port: "8000", labels: {llm-d.ai/engine-type: sglang}}
- {address: "[fd00::2]", port: "8000", labels: {llm-d.ai/engine-type: unheard-of}}
"""
    pods = parse_pods(text)
    assert [(pod.name, pod.url) for pod in pods] == [
        ("p0", "http://10.0.0.1:8000"),
        ("team/p1", "http://vllm.example:8001"),
        ("p2", "http://[fd00::1]:8000"),
        ("[fd00::2]:8000", "http://[fd00::2]:8000"),
    ]
    assert pods[0].labels == {"llm-d.ai/role": "prefill"}


def test_an_empty_list_has_no_pods() -> None:
    assert parse_pods("[]") == parse_pods("pods: []") == ()


def test_the_list_may_be_under_the_key_pods() -> None:
    assert parse_pods("pods:\n" + OURS) == parse_pods(OURS)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "expected"),
        ("a: 1", "must be a list of pods"),
        ("", "is empty; write [] for no pods"),
        ("# nothing\n", "is empty"),
        ("pods:\n", "is empty"),
        ("- {url: 'http://a', labels: {since: 2030-02-30}}", "1:37: '2030-02-30' cannot be read as timestamp: day is"),
        ("- 0x" + "f" * 5000, "cannot be read as int: it has more than 1024 bits"),
        ("- !!bool x", "1:3: 'x' cannot be read as bool"),
        ("- {url: 'http://a', url: 'http://b'}", "key 'url' stands twice"),
        ("[" * 100_000, "is nested too deeply"),
        ("- 7", "[0]: must be a mapping"),
        ("- {url: 'http://a', port: 1}", "[0]: unknown field 'port'; did you mean 'ports'?"),
        ("- {address: a}", "[0].port: is required"),
        ("- {address: a, port: x}", "[0].port: 'x' is not a port"),
        ("- {address: '', port: 1}", "[0].address: "),
        ("- {url: 'http://a'}\n- {url: 'http://a'}", "[1].url: 'http://a' is taken by [0]"),
    ],
)
def test_a_broken_file_is_refused_with_its_faults(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pods(text)
    assert fault in str(caught.value)


def test_all_faults_of_a_file_are_found() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pods("- {url: x}\n- {url: 'http://a'}\n- {name: y}\n")
    assert [problem.path for problem in caught.value.problems] == ["[0].url", "[2].url"]


async def settled(source: FileSource) -> list[str] | None:
    """The names of the pods after two looks at a file that has changed."""
    assert await source.poll() is None
    pods = await source.poll()
    return None if pods is None else [pod.name for pod in pods]


class PodsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(OURS)
        self.source = FileSource(str(path))

    def write(self, text: str, mode: str = "w") -> None:
        with self.path.open(mode) as file:
            file.write(text)


@pytest.fixture
def pods_file(tmp_path: Path) -> PodsFile:
    return PodsFile(tmp_path / "pods.yaml")


async def test_a_file_is_read_once_and_again_when_it_changes(pods_file: PodsFile) -> None:
    source = pods_file.source
    assert [pod.name for pod in await source.poll() or ()] == ["a"]
    assert await settled(source) is None
    pods_file.write(OURS.replace("name: a", "name: longer"))
    assert await settled(source) == ["longer"]


async def test_a_file_that_is_replaced_is_noticed_even_with_the_same_size_and_time(
    pods_file: PodsFile, tmp_path: Path
) -> None:
    other = tmp_path / "new.yaml"
    source = pods_file.source
    await source.poll()
    other.write_text(OURS.replace("name: a", "name: b"))
    stat = pods_file.path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(pods_file.path)
    assert await settled(source) == ["b"]


async def test_a_broken_edit_keeps_the_pods_and_is_logged_once(
    pods_file: PodsFile, caplog: pytest.LogCaptureFixture
) -> None:
    source = pods_file.source
    await source.poll()
    pods_file.write("- {url: nonsense}\n")
    assert await settled(source) is None
    assert await settled(source) is None
    assert caplog.text.count("is invalid; keeping its pods") == 1
    assert "[0].url: 'nonsense'" in caplog.text
    pods_file.write("- {url: http://a:1\n")
    assert await settled(source) is None
    assert "\n2:1: " in caplog.text
    pods_file.path.write_bytes(b"\xff\xfe")
    assert await settled(source) is None
    assert "is not UTF-8" in caplog.text
    pods_file.write(OURS)
    assert await settled(source) == ["a"]


async def test_a_truncated_file_keeps_the_pods_and_is_logged_once(
    pods_file: PodsFile, caplog: pytest.LogCaptureFixture
) -> None:
    source = pods_file.source
    await source.poll()
    pods_file.write("")
    assert await settled(source) is None
    assert await settled(source) is None
    assert caplog.text.count("is empty; write [] for no pods") == 1
    pods_file.write("[]")
    assert await settled(source) == []


async def test_a_file_that_is_still_being_written_is_not_read(pods_file: PodsFile) -> None:
    source = pods_file.source
    await source.poll()
    lines = [f"- {{url: 'http://{name}:1', name: {name}}}\n" for name in "abc"]
    pods_file.write("")
    for line in lines:
        assert await source.poll() is None
        pods_file.write(line, "a")
    assert await settled(source) == ["a", "b", "c"]


async def test_a_missing_file_keeps_the_pods_and_may_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pods.yaml"
    source = FileSource(str(path))
    assert await source.poll() is None
    assert await source.poll() is None
    assert caplog.text.count("cannot be read") == 1
    path.write_text(OURS)
    assert await settled(source) == ["a"]
    path.unlink()
    assert await settled(source) is None
    assert await settled(source) is None
    assert caplog.text.count("cannot be read") == 2


class Names:
    """A name server with changeable responses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.failing = False

    async def lookup(self, name: str) -> Sequence[str]:
        if self.failing:
            raise OSError(f"{name} is unknown")
        return self.addresses


async def test_every_address_of_a_name_is_a_pod() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    source = DnsSource(DnsSettings("vllm", 8000), names.lookup)
    assert [pod.url for pod in await source.poll() or ()] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    names.addresses = ["10.0.0.2", "10.0.0.1"]
    assert await source.poll() is None
    names.addresses = ["10.0.0.3"]
    assert [pod.name for pod in await source.poll() or ()] == ["10.0.0.3:8000"]


async def test_a_failed_or_empty_lookup_keeps_the_pods(caplog: pytest.LogCaptureFixture) -> None:
    names = Names("10.0.0.1")
    source = DnsSource(DnsSettings("vllm", 8000), names.lookup)
    await source.poll()
    names.failing = True
    assert await source.poll() is None
    assert await source.poll() is None
    assert caplog.text.count("vllm is unknown") == 1
    names.failing, names.addresses = False, ()
    assert await source.poll() is None
    names.addresses = ["10.0.0.1"]
    assert await source.poll() is None
    names.addresses = ["10.0.0.2"]
    assert await source.poll() is not None


async def test_the_systems_resolver_gives_addresses_of_one_family() -> None:
    assert await system_lookup("127.0.0.1") == ["127.0.0.1"]
    assert await system_lookup("::1") == ["::1"]


async def test_an_invalid_name_fails_as_a_lookup() -> None:
    source = DnsSource(DnsSettings("a" * 300, 8000))
    assert await source.poll() is None
