"""`kvlane metrics`: which series /metrics has."""

from __future__ import annotations

from collections.abc import Iterator

import click

from proxy import __version__
from proxy.telemetry.catalogue import Catalogue

HEAD = """# Series

Written by `kvlane metrics --markdown` from the catalogue itself: everything that `/metrics` at the admin port has,
beside the `process_…` series that all programs have. Of a histogram the buckets stand here; there are `_count` and
`_sum` too. [Queries to begin with](operating.md#six-queries), alerts and dashboards are in another place.

| series | kind | labels | meaning |
|---|---|---|---|
"""


@click.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference page docs/metrics.md.")
def metrics(as_markdown: bool) -> None:
    """List the series of /metrics, with what they mean.

    \b
    kvlane metrics
    kvlane metrics | grep queue

    Their values are at the admin port of a proxy that runs: curl localhost:9190/metrics
    """
    if as_markdown:
        lines = [
            f"| `{name}` | {kind} | {_code(labels)} | {_escaped(text)} |\n" for name, kind, labels, text in _rows()
        ]
        click.echo(HEAD + "".join(lines), nl=False)
        return
    for name, _, labels, text in _rows():
        click.echo(f"{name}{{{','.join(labels)}}}  {text}" if labels else f"{name}  {text}")


def _rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for family in Catalogue(__version__).families:
        yield family.sample_names[0], family.kind, family.labels, family.help


def _code(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
