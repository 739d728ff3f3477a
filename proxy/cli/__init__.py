"""The command `kvlane`: one module per group of commands, imported when a command of the group is called."""

from __future__ import annotations

import importlib
import re
from typing import Any

import click

from proxy import __version__
from proxy.core.errors import ConfigError, KvlaneError
from proxy.core.params import suggestion

COMMANDS = {
    "serve": ("serve", "Run the proxy."),
    "sim": ("sim", "Run simulated vLLM pods."),
    "demo": ("demo", "Compare prefix-aware routing with round robin on this machine."),
    "check": ("configuration", "Check a configuration, and show every value in effect."),
    "doctor": ("tools", "Examine running pods, and recommend a configuration for them."),
    "import": ("tools", "Convert the configuration of another router or gateway."),
    "key": ("tools", "Create an API key."),
    "plugins": ("configuration", "Describe the plugin types."),
    "metrics": ("configuration", "List the series of /metrics with their meaning."),
    "top": ("admin", "Show the fleet in the terminal, live."),
    "drain": ("admin", "Take pods out of service, for maintenance."),
    "undrain": ("admin", "Return drained pods to service."),
    "explain": ("explain", "Explain why a request went to its pod, or where one would go."),
    "replay": ("replay", "Run recorded requests through other configurations, on a virtual clock."),
    "tune": ("replay", "Search weights that would have served recorded requests better."),
    "autoscale": ("autoscale", "Check, evaluate and replay autoscaling policies."),
    "schema": ("configuration", "Print the JSON Schema of the configuration, for editors."),
    "completion": ("tools", "Print the shell script that completes commands and options."),
}


class Misconfigured(click.ClickException):
    """An invalid configuration; the message has a line for each fault."""

    exit_code = 2

    def __init__(self, error: ConfigError) -> None:
        count = len(error.problems)
        head = f"the configuration has {count} faults:" if count > 1 else "the configuration has a fault:"
        lines = [head, *(f"  {problem}" for problem in error.problems)]
        super().__init__("\n".join([*lines, f"Hint: {error.hint}"] if error.hint else lines))


class Commands(click.Group):
    """The group of all commands. `--help` needs no imports; a command imports the modules that it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        function = "import_" if name == "import" else name  # a reserved word
        command: click.Command = getattr(importlib.import_module(f"proxy.cli.{module}"), function)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _with_hint(error) from None
        except ConfigError as error:
            raise Misconfigured(error) from None
        except KvlaneError as error:
            raise click.ClickException(str(error)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command '{args[0]}'{suggestion(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _with_hint(error: click.UsageError) -> click.UsageError:
    """Return the error; for a file without -c and URLs without --pod, it names the option."""
    found = _EXTRA.fullmatch(error.message)
    options = {each.name for each in error.ctx.command.params} if error.ctx is not None else set()
    if found is None or "config" not in options:
        return error
    words = found[1].split()
    if "pods" in options and all("://" in word for word in words):
        return click.UsageError(f"{error.message}; use {' '.join(f'--pod {word}' for word in words)}", error.ctx)
    return click.UsageError(f"{error.message}; use -c {words[0]}", error.ctx)


_EXTRA = re.compile(r"Got unexpected extra arguments? \((.+)\)")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvlane")
def main() -> None:
    """One OpenAI endpoint for a fleet of vLLM pods.

    \b
    kvlane demo                                        compare routing policies on simulated pods
    kvlane doctor http://vllm-0:8000 > kvlane.yaml     examine your pods, and write a first configuration
    kvlane check -c kvlane.yaml                        print every value in effect, or every fault
    kvlane serve -c kvlane.yaml                        serve OpenAI's API on port 8000, the admin API on 9190

    Every command has a help page: kvlane serve --help.

    Exit code 0: success. 2: the command line or a file is invalid. 1: a failure, such as a port in use, or a result
    that the help of the command describes.
    """
