"""An exec actuator for the tests: makes as many processes of `kvlane sim` run as are desired, and lists them in a file.

    python scale_pods.py DIRECTORY ROLE DESIRED VICTIMS

Each pod is a process of its own. The proxy reads `DIRECTORY/pods.yaml`; `DIRECTORY/log` has a line for every pod that
was started or stopped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

SIM = ("-m", "proxy", "sim", "--time-scale", "4")


def main(directory: Path, role: str, desired: int, victims: list[str]) -> None:
    pods: list[dict[str, str]] = json.loads((directory / "pods.yaml").read_text())
    mine = [pod for pod in pods if pod["role"] == role]
    while len(mine) < desired:
        mine.append(start(directory, role))
        pods.append(mine[-1])
    for pod in sorted(mine, key=lambda pod: pod["name"] not in victims)[: max(len(mine) - desired, 0)]:
        pods.remove(pod)
        publish(directory, pods)
        stop(directory, pod)
    publish(directory, pods)


def start(directory: Path, role: str) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, *SIM, "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    note(directory, f"start {process.pid}")
    return {"name": f"{role}-{process.pid}", "url": f"http://127.0.0.1:{port}", "role": role}


def stop(directory: Path, pod: dict[str, str]) -> None:
    """At once: whatever runs there is cut."""
    pid = int(pod["name"].rpartition("-")[2])
    os.kill(pid, signal.SIGKILL)
    note(directory, f"stop {pid}")


def publish(directory: Path, pods: list[dict[str, str]]) -> None:
    new = directory / "pods.new"
    new.write_text(json.dumps(pods))
    new.rename(directory / "pods.yaml")


def note(directory: Path, line: str) -> None:
    with (directory / "log").open("a") as log:
        log.write(f"{line}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","))
