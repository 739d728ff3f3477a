"""`kvlane key`: a key for a client, and what a configuration keeps of it."""

from __future__ import annotations

import click

from proxy.auth.authenticator import hashed, new_key


@click.command()
def key() -> None:
    """Make an API key. The key is for the client, and is shown this once; the hash is for `security.apiKeys`, and
    nobody can make the key of it.

    \b
    security:
      apiKeys:
        - {name: chat-app, hash: "sha256:..."}
    """
    secret = new_key()
    click.echo(f"key:  {secret}\nhash: {hashed(secret)}")
