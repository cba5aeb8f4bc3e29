"""Completion of `quant` in bash, zsh and fish: scripts generated from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class _Option:
    """An option of a command.

    Attributes:
        flags: its spellings.
        help: one line.
        takes: "nothing", "file", "words" or "text".
        words: what it can be, if those are known.
    """

    flags: tuple[str, ...]
    help: str
    takes: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Command:
    """A command with its options; `words` and `files` are what may stand in their place."""

    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]
    files: bool


def script(shell: str, parser: argparse.ArgumentParser, others: Mapping[str, argparse.ArgumentParser]) -> str:
    """The completion script for one of SHELLS.

    Args:
        parser: with the commands.
        others: parsers of commands that have one of their own, by name.
    """
    [verbs] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in verbs._choices_actions}
    commands = [_command(name, helps[name], others.get(name, one)) for name, one in verbs.choices.items()]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _command(name: str, help: str, parser: argparse.ArgumentParser) -> _Command:
    options = [_option(parser, action) for action in parser._actions if action.option_strings]
    places = [action for action in parser._actions if not action.option_strings]
    words = tuple(str(word) for action in places for word in action.choices or ())
    return _Command(name, help, tuple(options), words, any(_is_file(action) for action in places))


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> _Option:
    help = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
    words = tuple(map(str, action.choices or ()))
    takes = "nothing" if action.nargs == 0 else "words" if words else "file" if _is_file(action) else "text"
    return _Option(tuple(action.option_strings), help, takes, words)


def _is_file(action: argparse.Action) -> bool:
    """Whether a file may stand there; the metavar or, without one, the type says so."""
    named = action.metavar if isinstance(action.metavar, str) else ""
    return "FILE" in named or "FOLDER" in named or getattr(action.type, "__name__", "") == "Path"


def _bash(commands: list[_Command]) -> str:
    values, places = [], []
    for command in commands:
        for option in command.options:
            if option.takes != "nothing":
                patterns = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
                reply = {"file": "_quant_files", "words": f"_quant_words '{' '.join(option.words)}'", "text": ":"}
                values.append(f"    {patterns}) {reply[option.takes]}; return ;;")
        flags = " ".join(flag for option in command.options for flag in option.flags)
        other = (
            f"_quant_words '{' '.join(command.words)}'" if command.words else "_quant_files" if command.files else ":"
        )
        places.append(f"    {command.name}) if [[ $cur == -* ]]; then _quant_words '{flags}'; else {other}; fi ;;")
    names = " ".join(command.name for command in commands)
    return "\n".join(
        [
            "# Completion of quant in bash: source <(quant completion bash)",
            "# No mapfile: bash 3.2, which macOS has, does not know it.",
            '_quant_words() { COMPREPLY=($(compgen -W "$1" -- "$cur")); }',
            "_quant_files() { local IFS=$'\\n'; COMPREPLY=($(compgen -f -- \"$cur\")); }",
            "_quant() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}"',
            "  COMPREPLY=()",
            f"  if ((COMP_CWORD == 1)); then _quant_words '{names} --help --version'; return; fi",
            '  case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *places,
            "  esac",
            "}",
            "complete -o filenames -F _quant quant",
            "",
        ]
    )


def _zsh(commands: list[_Command]) -> str:
    cases = []
    for command in commands:
        specs = [_zsh_spec(flag, option) for option in command.options for flag in option.flags]
        if command.words:
            specs.append(_quoted(f"1:{command.name}:({' '.join(command.words)})"))
        elif command.files:
            specs.append(_quoted("*:file:_files"))
        cases += [f"    {command.name}) _arguments \\", *(f"      {spec} \\" for spec in specs), "      && return ;;"]
    names = [f"    {_quoted(f'{command.name}:{command.help}')}" for command in commands]
    return "\n".join(
        [
            "#compdef quant",
            "# Completion of quant in zsh: quant completion zsh >DIRECTORY-OF-FPATH/_quant",
            "_quant() {",
            "  local -a commands",
            "  commands=(",
            *names,
            "  )",
            "  if ((CURRENT == 2)); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  local command=$words[2]",
            "  shift words",
            "  ((CURRENT--))",
            "  case $command in",
            *cases,
            "  esac",
            "}",
            'if [[ $funcstack[1] == _quant ]]; then _quant "$@"; else compdef _quant quant; fi',
            "",
        ]
    )


def _zsh_spec(flag: str, option: _Option) -> str:
    help = option.help.replace("[", "(").replace("]", ")").replace(":", ";")
    value = {"nothing": "", "file": ":file:_files", "words": f":value:({' '.join(option.words)})", "text": ":value: "}
    return _quoted(f"*{flag}[{help}]{value[option.takes]}")


def _fish(commands: list[_Command]) -> str:
    names = " ".join(command.name for command in commands)
    lines = [
        "# Completion of quant in fish: quant completion fish >~/.config/fish/completions/quant.fish",
        "complete -c quant -f",
    ]
    for command in commands:
        asked = f"-n {_quoted(f'not __fish_seen_subcommand_from {names}')}"
        lines.append(f"complete -c quant {asked} -a {command.name} -d {_quoted(command.help)}")
        within = f"-n {_quoted(f'__fish_seen_subcommand_from {command.name}')}"
        if command.words:
            lines.append(f"complete -c quant {within} -a {_quoted(' '.join(command.words))}")
        if command.files:
            lines.append(f"complete -c quant {within} -F")
        for option in command.options:
            value = {
                "nothing": "",
                "file": " -r -F",
                "words": f" -x -a {_quoted(' '.join(option.words))}",
                "text": " -x",
            }
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            lines.append(f"complete -c quant {within} {flags}{value[option.takes]} -d {_quoted(option.help)}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """A word in single quotes, as zsh and fish both read it: '\\'' for a quote, and no other sign has a meaning."""
    return "'" + text.replace("'", "'\\''") + "'"
