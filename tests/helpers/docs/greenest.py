"""The example package of `docs/writing-plugins.md`, as an installer leaves it, and its external service."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from tests.helpers.docs.pages import PACKAGE

MODULE = "kvlane_greenest"


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """The modules and the entry points, on the path of this interpreter."""
    shutil.copytree(PACKAGE / MODULE, site / MODULE)
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = site / f"{MODULE}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = project["entry-points"]["kvlane.plugins"]
    points = "".join(f"{name} = {module}\n" for name, module in entries.items())
    (info / "entry_points.txt").write_text("[kvlane.plugins]\n" + points)
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in [name for name in sys.modules if name.partition(".")[0] == MODULE]:
            del sys.modules[name]


@dataclass(slots=True)
class Forecast:
    """Responds with `shares` if there are any; otherwise hangs until the other side gives up."""

    shares: Mapping[str, float] | None
    port: int = 0
    queries: int = 0
    given_up: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        self.queries += 1
        if self.shares is not None:
            writer.write(orjson.dumps(self.shares) + b"\n")
        elif not await reader.read():
            self.given_up += 1
        writer.close()


@asynccontextmanager
async def forecast(shares: Mapping[str, float] | None) -> AsyncIterator[Forecast]:
    service = Forecast(shares)
    async with await asyncio.start_server(service.serve, "127.0.0.1", 0) as server:
        service.port = server.sockets[0].getsockname()[1]
        yield service
