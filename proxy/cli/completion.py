"""`kvlane completion`: so that the shell completes commands, options, and names that a running proxy knows."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

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
"""Not click's: bash ends a word at a colon, and pods are called HOST:PORT unless somebody names them. So the line is
asked about, and of what is offered only what comes after the last colon is given to bash."""


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that has a shell complete kvlane's commands, options and their values.

    \b
    kvlane completion bash > ~/.local/share/bash-completion/completions/kvlane
    kvlane completion zsh > "${fpath[1]}/_kvlane"
    kvlane completion fish > ~/.config/fish/completions/kvlane.fish

    The shell then asks kvlane itself, so what it offers is what is installed; and names of pods are those of the proxy
    that --url names. Bash needs to be 4.4 or newer.
    """
    asked = _SHELLS[shell](context.find_root().command, {}, "kvlane", _VARIABLE)
    click.echo((_BASH if shell == "bash" else asked.source_template) % asked.source_vars())
