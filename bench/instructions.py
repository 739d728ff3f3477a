"""Instructions that kvlane takes per request, by library and by function of C: `python bench/instructions.py [--json]`.

`kvlane serve` of this checkout (or `--tree`) runs under valgrind's callgrind, with the configuration and the engines of
`cpu.py`. What is counted does not depend on the machine or on what else it does: two runs differ by 0.3 %, so a change
of 1 % is one. Time goes as much slower for the proxy as valgrind is, or its timers would weigh too much. The kernel is
not counted. Needs valgrind and what `cpu.py` needs, and takes two minutes.

With `--still` time hardly passes: no scrape and no timer falls into the measurement, so two runs of one checkout differ
by 0.5 % also on a busy machine. Use it to compare two checkouts.

With `--workers 2` it is two workers and their supervisor together. What they tell each other is gathered for some
milliseconds, so it costs the less per request the more requests there are in a second of the proxy's time, which is
printed; `--slower` changes it.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cpu
import peers
import rig
from callgrind import Profile, read
from rig import EVENTS, HERE, PATH, Program, Rig, Site, table

SLOWER, STILL = 40.0, 4000.0
"""Times; so many does valgrind take for what takes one. At the second one a run takes milliseconds of the proxy's time.
"""

rig.READY_SECONDS = 600.0


def main() -> None:
    options = _options()
    if not shutil.which("valgrind"):
        sys.exit("not found: valgrind; on Debian: apt-get install valgrind libc6-dbg")
    case = cpu.CASES[options.case]
    with Rig() as running:
        files, rate = _measured(running, case, options)
        profile = read(line for file in files for line in file.read_text().splitlines())
    per = options.requests * (EVENTS if case.interval_us else 1)
    found = {
        "case": case.name,
        "per": case.per.removesuffix("s"),
        "instructions": round(profile.total / per),
        "requests_per_second": round(rate),
        "libraries": {name: round(spent / per) for name, spent in profile.by_library.most_common(8)},
        "functions": {
            name: {"instructions": round(spent / per), "calls": round(profile.calls[name] / per, 1)}
            for name, spent in profile.own.most_common(options.top)
        },
    }
    print(json.dumps(found, indent=1) if options.json else _as_text(found, profile))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=cpu.CASES, default="1k", help="of cpu.py  [default: 1k]")
    parser.add_argument("--requests", type=int, default=1500, help="that are counted  [default: 1500]")
    parser.add_argument("--connections", type=int, default=16, help="each with one request at a time  [default: 16]")
    parser.add_argument("--top", type=int, default=25, help="functions that are shown  [default: 25]")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="another checkout of kvlane")
    parser.add_argument("--still", action="store_true", help="without scrapes and timers")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slower", type=float, default=SLOWER, help=f"times that valgrind takes  [default: {SLOWER}]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def _measured(running: Rig, case: cpu.Case, options: argparse.Namespace) -> tuple[list[Path], float]:
    """The files that callgrind wrote of the requests, one for each process, after as many to get warm; and the requests
    per second of the proxy's time."""
    factor = running.folder / "factor"
    factor.touch()
    _set(factor, 1.0)
    clock = running.folder / "slowclock.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", clock, HERE / "slowclock.c", "-ldl"], check=True)
    plain = peers.kvlane("kvlane", options.tree)
    environment = [f"LD_PRELOAD={clock}", f"SLOW_FACTOR={factor}"]
    command = partial(_under_valgrind, plain, options.workers, environment, running.folder)
    proxy = running.start(Program("kvlane", command, plain.version, plain.folder), running.engines())
    clients = [socket.create_connection(("127.0.0.1", proxy.site.port)) for _ in range(options.connections)]
    request = _request(case.body())
    _load(clients, request, options.requests // 2)
    slower = STILL if options.still else options.slower
    processes = _processes(proxy.process.pid)
    _control(processes, "--instr=on")
    _set(factor, slower)
    _load(clients, request, options.requests // 2)
    _control(processes, "--zero")
    started = time.monotonic()
    _load(clients, request, options.requests)
    seconds = time.monotonic() - started
    _control(processes, "--dump")
    _control(processes, "--instr=off")
    _set(factor, 1.0)
    dumps = [list(running.folder.glob(f"callgrind.out.{process}*")) for process in processes]
    return [max(found, key=lambda dump: dump.stat().st_size) for found in dumps], options.requests / seconds * slower


def _processes(parent: int) -> list[int]:
    """The process and all that it started."""
    started = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *[each for child in started for each in _processes(int(child))]]


def _set(factor: Path, value: float) -> None:
    """In place: who looks into a mapped file while it is empty, is killed by a bus error."""
    with factor.open("r+b") as file:
        file.write(struct.pack("d", value))


def _under_valgrind(plain: Program, workers: int, environment: list[str], folder: Path, site: Site) -> list[str]:
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-recs=1", "--trace-children=yes"]
    valgrind.append(f"--callgrind-out-file={folder}/callgrind.out.%p")
    command = plain.command(site)
    if workers > 1:
        command += ["--workers", str(workers)]
    return ["env", "PYTHONHASHSEED=0", *environment, *valgrind, *command]


def _control(processes: list[int], what: str) -> None:
    for process in processes:
        subprocess.run(["callgrind_control", what, str(process)], check=True, capture_output=True)


def _request(body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _load(clients: list[socket.socket], request: bytes, number: int) -> None:
    """So many requests; each client sends its next one after its response."""
    left = number
    responses: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as waiting:
        for client in clients:
            waiting.register(client, selectors.EVENT_READ)
        while left or responses:
            for client in clients:
                if left and client not in responses:
                    responses[client] = b""
                    left -= 1
                    client.sendall(request)
            for key, _ in waiting.select():
                client = key.fileobj
                assert isinstance(client, socket.socket)
                responses[client] += client.recv(1 << 18)
                if _is_whole(responses[client]):
                    del responses[client]


def _is_whole(raw: bytes) -> bool:
    head, end, body = raw.partition(b"\r\n\r\n")
    if end and b" 200 " not in head[:16]:
        sys.exit(f"not a good response: {raw[:500]!r}")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and (body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length[1]))


def _as_text(found: dict[str, object], profile: Profile) -> str:
    total = profile.total
    share = found["instructions"] / total  # type: ignore[operator]
    libraries = [[name, f"{n * share:.0f}", f"{n / total:.1%}"] for name, n in profile.by_library.most_common(8)]
    functions = [
        [name, f"{profile.own[name] * share:.0f}", f"{profile.own[name] / total:.1%}", str(entry["calls"])]
        for name, entry in found["functions"].items()  # type: ignore[attr-defined]
    ]
    return "\n\n".join(
        (
            f"{found['case']}: {found['instructions']} instructions per {found['per']}, at "
            f"{found['requests_per_second']} requests per second",
            table([["library", "instructions", "share"], *libraries]),
            table([["function", "instructions", "share", "calls"], *functions]),
        )
    )


if __name__ == "__main__":
    main()
