"""`kvlane import`: the configuration of another router or gateway, as kvlane's own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from proxy.cli.completing import files
from proxy.cli.configuration import Misconfigured
from proxy.core.errors import ConfigError, cause
from proxy.tools.endpoint_picker import endpoint_picker
from proxy.tools.imported import Imported, Unreadable
from proxy.tools.litellm import litellm
from proxy.tools.production_stack import production_stack
from proxy.tools.routers import sglang_router, vllm_router

INCOMPLETE = 1

_THEIR_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}

_output = click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write.  [standard output]")
_words = click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=files)
_file = click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))


@click.group("import")
def import_() -> None:
    """Make a configuration of that of another router or gateway.

    \b
    kvlane import vllm-router -o kvlane.yaml vllm-router --worker-urls http://a:8000 http://b:8000
    kvlane import litellm litellm.yaml > kvlane.yaml

    What has no equivalent, and what needs none, is named in comments of the YAML and on standard error. Secrets are not
    taken over: ${NAME} stands in their place. The YAML loads, else nothing is written.

    Exit code 0 if all was taken over, 1 if something has no equivalent, 2 if nothing could be made of it.
    """


@import_.command("vllm-router", context_settings=_THEIR_WORDS)
@_output
@_words
def from_vllm_router(output: Path | None, words: tuple[str, ...]) -> None:
    """The command line of vllm-router, as words, as one quoted text, or - to read it from standard input.

    \b
    kvlane import vllm-router vllm-router --worker-urls http://a:8000 http://b:8000 --policy cache_aware
    """
    _write(lambda: vllm_router(_split(words)), output)


@import_.command("sglang-router", context_settings=_THEIR_WORDS)
@_output
@_words
def from_sglang_router(output: Path | None, words: tuple[str, ...]) -> None:
    """The command line of sglang-router, as words, as one quoted text, or - to read it from standard input.

    \b
    kvlane import sglang-router "python -m sglang_router.launch_router --worker-urls http://a:8000 http://b:8000"
    """
    _write(lambda: sglang_router(_split(words)), output)


@import_.command("production-stack", context_settings=_THEIR_WORDS)
@_output
@_words
def from_production_stack(output: Path | None, words: tuple[str, ...]) -> None:
    """The command line of the production stack's router, or the file of its dynamic configuration.

    \b
    kvlane import production-stack vllm-router --static-backends http://a:8000 --routing-logic roundrobin
    kvlane import production-stack dynamic_config.yaml
    """
    _write(lambda: production_stack(_split(words)), output)


@import_.command("endpoint-picker")
@_output
@_file
def from_endpoint_picker(output: Path | None, file: Path) -> None:
    """An EndpointPickerConfig, of llm-d say, or what holds one: a ConfigMap, values of a chart, an object of KServe."""
    _write(lambda: endpoint_picker(file), output)


@import_.command("litellm")
@_output
@_file
def from_litellm(output: Path | None, file: Path) -> None:
    """What a LiteLLM configuration says of vLLM servers.

    \b
    kvlane import litellm config.yaml -o kvlane.yaml
    """
    _write(lambda: litellm(file), output)


def _split(words: Sequence[str]) -> list[str]:
    """One text is split as a shell would, also over lines that end in a backslash. Raises ValueError."""
    text = sys.stdin.read() if list(words) == ["-"] else words[0] if len(words) == 1 else None
    return list(words) if text is None else shlex.split(text.replace("\\\n", " "))


def _write(make: Callable[[], Imported], output: Path | None) -> None:
    try:
        made = make()
        made.check()
    except ConfigError as error:
        raise Misconfigured(error) from None
    except (Unreadable, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if output is None:
        click.echo(made.text(), nl=False)
    else:
        _save(output, made.text())
    for note in made.notes:
        click.secho(f"To do: {note}", fg="blue", err=True)
    for left in made.missing:
        click.secho(f"No equivalent: {left}", fg="yellow", err=True)
    if made.missing:
        raise SystemExit(INCOMPLETE)


def _save(output: Path, text: str) -> None:
    try:
        output.write_text(text)
    except OSError as error:
        raise click.UsageError(f"{output}: {cause(error)}") from None
