"""Commands that need no running proxy: `doctor`, `import`, `key`, `completion`."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import click
import yaml
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from proxy.auth.authenticator import hashed, new_key
from proxy.cli.admin import files
from proxy.cli.options import output_option, write
from proxy.core.params import plain
from proxy.core.ports import SystemClock
from proxy.fleet.settings import PodSettings
from proxy.telemetry.logs import visible
from proxy.tools.endpoint_picker import endpoint_picker
from proxy.tools.findings import IS_KVLANE, Finding, Level, of_fleet, of_pod, recommended
from proxy.tools.imported import Imported, InvalidDocument
from proxy.tools.litellm import litellm
from proxy.tools.probe import EVENTS_PORT, IDLE, ProbeOptions, probe_pods
from proxy.tools.production_stack import production_stack
from proxy.tools.routers import sglang_router, vllm_router

DECISIONS_HINT = "# telemetry: {decisions: {}}  # keeps recent decisions for the dashboard and kvlane explain"

_COLOURS = {Level.OK: "green", Level.NOTE: "blue", Level.WARNING: "yellow", Level.FAULT: "red"}


def _urls(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    for url in value:
        try:
            PodSettings(url)
        except ValueError as error:
            raise click.BadParameter(str(error).removeprefix("url: ")) from None
    return list(dict.fromkeys(url.rstrip("/") for url in value))


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True, callback=_urls)
@click.option(
    "--api-key", envvar="VLLM_API_KEY", default="", help="API key that is sent to the pods; default: $VLLM_API_KEY."
)
@click.option("--no-requests", is_flag=True, help="Send no inference requests; read only what the pods report.")
@click.option(
    "--events-port", type=click.IntRange(1, 65535), default=EVENTS_PORT, show_default=True, help="Port of KV events."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Timeout of one request, in seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print observations, findings and the configuration as JSON.")
def doctor(urls: list[str], api_key: str, no_requests: bool, events_port: int, timeout: float, as_json: bool) -> None:
    """Examine running pods, and recommend a configuration for them: which engine they run, whether kvlane can see their
    load and their cache, and whether they stop a request when its client leaves.

    \b
    kvlane doctor http://vllm-0:8000 http://vllm-1:8000 > kvlane.yaml

    The findings and their remedies go to standard error, the configuration to standard output. Each pod gets about four
    short completions, and a long one that is cancelled after its first token. Where the engine transfers KV caches with
    NIXL, one completion leaves a block of cache for another pod. The command takes about ten seconds, mostly to find
    out when pods close idle connections. Use --no-requests for pods that cannot serve a request alone, as with P2P
    NCCL.

    Exit code 0: no warnings. 1: there is a warning or a fault. 2: the command line is invalid.
    """
    manner = ProbeOptions(api_key, timeout, not no_requests, events_port, idle=min(timeout, IDLE))
    if sys.stderr.isatty():
        click.echo("Examining the pods, for about ten seconds ...", err=True)
    pods = asyncio.run(probe_pods(urls, manner, SystemClock(), Random()))
    found = [finding for pod in pods for finding in of_pod(pod)] + of_fleet(pods)
    configuration = recommended(pods)
    if as_json:
        described = {"pods": plain(pods), "findings": plain(found), "configuration": configuration}
        click.echo(json.dumps(_finite(described), indent=2, ensure_ascii=False))
    else:
        _print(found)
        if configuration["pods"]["static"]:
            for pod in pods:
                if pod.unreachable:
                    why = "is a kvlane" if pod.unreachable == IS_KVLANE else "did not respond"
                    click.echo(f"# left out, because it {why}: {pod.url}")
            click.echo(yaml.safe_dump(configuration, sort_keys=False, width=120), nl=False)
            click.echo(DECISIONS_HINT)
    if any(finding.is_bad for finding in found):
        raise SystemExit(1)


def _print(findings: Sequence[Finding]) -> None:
    for pod, own in groupby(findings, key=lambda finding: finding.pod):
        click.secho(pod or "all pods", bold=True, err=True)
        for finding in own:
            level = click.style(f"{finding.level.value:8}", fg=_COLOURS[finding.level])
            click.echo(f"  {level}{finding.check:15} {visible(finding.text)}", err=True)
            if finding.fix:
                click.echo(f"{'':26}{visible(finding.fix)}", err=True)


def _finite(value: Any) -> Any:
    """Return the data with infinity as text, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


_THEIR_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}

_words = click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=files)
_file = click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))


@click.group("import")
def import_() -> None:
    """Convert the configuration of another router or gateway.

    \b
    kvlane import vllm-router -o kvlane.yaml vllm-router --worker-urls http://a:8000 http://b:8000
    kvlane import litellm litellm.yaml > kvlane.yaml

    Comments of the YAML and messages on standard error name the settings that have no equivalent or are faulty, which
    are left out, the plugins that need a package, and the settings that need no equivalent. Secrets are replaced by
    ${NAME}. The YAML is checked before it is written.

    Exit code 0: all settings were converted. 1: a setting is left out, or a package is missing. 2: the input cannot be
    used.
    """


@import_.command("vllm-router", short_help="Convert a command line of vllm-router.", context_settings=_THEIR_WORDS)
@output_option
@_words
def from_vllm_router(output: Path | None, words: tuple[str, ...]) -> None:
    """Convert a command line of vllm-router: as words, as one quoted text, or - to read it from standard input.

    \b
    kvlane import vllm-router vllm-router --worker-urls http://a:8000 http://b:8000 --policy cache_aware
    """
    _import(lambda: vllm_router(_split(words)), output)


@import_.command("sglang-router", short_help="Convert a command line of sglang-router.", context_settings=_THEIR_WORDS)
@output_option
@_words
def from_sglang_router(output: Path | None, words: tuple[str, ...]) -> None:
    """Convert a command line of sglang-router: as words, as one quoted text, or - to read it from standard input.

    \b
    kvlane import sglang-router "python -m sglang_router.launch_router --worker-urls http://a:8000 http://b:8000"
    """
    _import(lambda: sglang_router(_split(words)), output)


@import_.command(
    "production-stack",
    short_help="Convert a command line of the production stack's router.",
    context_settings=_THEIR_WORDS,
)
@output_option
@_words
def from_production_stack(output: Path | None, words: tuple[str, ...]) -> None:
    """Convert a command line of the production stack's router, or the file of its dynamic configuration.

    \b
    kvlane import production-stack vllm-router --static-backends http://a:8000 --routing-logic roundrobin
    kvlane import production-stack dynamic_config.yaml
    """
    _import(lambda: production_stack(_split(words)), output)


@import_.command("endpoint-picker", short_help="Convert an EndpointPickerConfig of llm-d.")
@output_option
@_file
def from_endpoint_picker(output: Path | None, file: Path) -> None:
    """Convert an EndpointPickerConfig of llm-d, or an object with one: a ConfigMap, chart values, an object of
    KServe."""
    _import(lambda: endpoint_picker(file), output)


@import_.command("litellm")
@output_option
@_file
def from_litellm(output: Path | None, file: Path) -> None:
    """Convert the vLLM servers of a LiteLLM configuration.

    \b
    kvlane import litellm config.yaml -o kvlane.yaml
    """
    _import(lambda: litellm(file), output)


def _split(words: Sequence[str]) -> list[str]:
    """Split a text as a shell does, also over lines that end in a backslash. Raise ValueError."""
    text = sys.stdin.read() if list(words) == ["-"] else words[0] if len(words) == 1 else None
    return list(words) if text is None else shlex.split(text.replace("\\\n", " "))


def _import(make: Callable[[], Imported], output: Path | None) -> None:
    try:
        made = make()
        made.check()
    except (InvalidDocument, ValueError) as error:
        raise click.UsageError(str(error)) from None
    write(output, made.text())
    for note in made.notes:
        click.secho(f"To do: {note}", fg="blue", err=True)
    for kind, piece in made.incomplete:
        click.secho(f"{kind}: {piece}", fg="yellow", err=True)
    if made.incomplete:
        raise SystemExit(1)


@click.command()
def key() -> None:
    """Create an API key. The key is for the client, and is shown only now. The hash is for `security.apiKeys`; the key
    cannot be computed from it.

    \b
    security:
      apiKeys:
        - {name: chat-app, hash: "sha256:..."}
    """
    secret = new_key()
    click.echo(f"key:  {secret}\nhash: {hashed(secret)}")


_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_KVLANE_COMPLETE"

_BASH = r"""%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" word type value
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word="${words[-1]#--*=}"
    while IFS=',' read -r type value; do
        if [[ $type == plain ]]; then
            COMPREPLY+=("${value#"${word%%"${word##*[:=]}"}"}")
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == dir ]]; then
            compopt -o dirnames
        fi
    done < <(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1" 2> /dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""A completion script for bash. Click's own script does not work for names with a colon: bash ends a word at a colon,
and pods without a name are called HOST:PORT. So the script returns only the part after the last colon to bash."""


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes kvlane's commands, options and values.

    \b
    kvlane completion bash > ~/.local/share/bash-completion/completions/kvlane
    kvlane completion zsh > "${fpath[1]}/_kvlane"
    kvlane completion fish > ~/.config/fish/completions/kvlane.fish

    For each completion the shell runs kvlane, which also offers installed plugins, and the names of pods of the proxy
    at --url. Bash must be 4.4 or newer.
    """
    script = _SHELLS[shell](context.find_root().command, {}, "kvlane", _VARIABLE)
    click.echo((_BASH if shell == "bash" else script.source_template) % script.source_vars())
