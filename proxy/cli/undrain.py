"""`kvlane undrain`: give pods requests again."""

from __future__ import annotations

import click

from proxy.cli.admin_port import asked, key_option, path_of, url_option
from proxy.cli.completing import pods_in


@click.command()
@click.argument("pods", metavar="POD...", nargs=-1, required=True, shell_complete=pods_in("draining"))
@url_option
@key_option
def undrain(pods: tuple[str, ...], url: str, key: str) -> None:
    """Send pods requests again that `kvlane drain`, the dashboard or the admin port has drained.

    \b
    kvlane undrain vllm-0

    Exit code 0, or 2 if there is no such pod, or no answer.
    """
    for pod in pods:
        said = asked(url, path_of(pod, "undrain"), key, {}, b"")
        click.echo(f"{pod}: {said['state']}")
