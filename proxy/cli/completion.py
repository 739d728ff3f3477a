"""`kvlane completion`: so that the shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_KVLANE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that has a shell complete kvlane's commands, options and their values.

    \b
    kvlane completion bash > ~/.local/share/bash-completion/completions/kvlane
    kvlane completion zsh > "${fpath[1]}/_kvlane"
    kvlane completion fish > ~/.config/fish/completions/kvlane.fish

    The shell then asks kvlane itself, so what it offers is what is installed. Bash needs to be 4.4 or newer.
    """
    asked = _SHELLS[shell](context.find_root().command, {}, "kvlane", _VARIABLE)
    click.echo(asked.source_template % asked.source_vars())
