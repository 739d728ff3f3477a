"""The command `kvlane`: a file per command, imported when it is called."""

from __future__ import annotations

import importlib

import click

from proxy import __version__

COMMANDS = {
    "serve": "Run the proxy.",
    "sim": "Run simulated vLLM pods.",
    "demo": "See prefix-aware routing beat round robin on this machine.",
    "check": "Check a configuration and show what it amounts to.",
    "plugins": "Describe the plugin types.",
    "explain": "Run the scheduler on a state from a file and show why it decides as it does.",
}


class Commands(click.Group):
    """`--help` needs no imports; a command imports what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"proxy.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvlane")
def main() -> None:
    """One OpenAI endpoint for a fleet of vLLM pods."""
