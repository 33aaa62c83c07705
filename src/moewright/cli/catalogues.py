"""Verbs of what is known by name: models, hardware, and what a shell completes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from cyclopts import App

from moewright.cli.answers import write_answer
from moewright.cli.option_types import JsonOption
from moewright.spec.units import GIGA

if TYPE_CHECKING:
    from moewright.spec.record import Row


def models(*words: str, json: JsonOption = None) -> int:
    """List the models that are known by name, with the sources of their figures.

    Parameters
    ----------
    words
        Parts of a name, in either case, such as "qwen3 moe"; all models when not given.
    json
        Write the table to this file; "-": to standard output, and the text to standard error.
    """
    from moewright.api.catalogues import models as list_models

    table = list_models(" ".join(words))
    with write_answer(table, json) as console:
        for line in fit_table(table.to_rows(), console.width):
            console.print(line)
    return 0


def hardware(on: str = "", /, *, json: JsonOption = None) -> int:
    """List the devices that are known by name, or show one, with the sources of its figures.

    Parameters
    ----------
    on
        One hardware as count x device, such as "256xH800", a device, or a hardware file; all known
        devices when not given.
    json
        Write the figures to this file; "-": to standard output, and the text to standard error.
    """
    from moewright.api.catalogues import HardwareTable
    from moewright.api.catalogues import hardware as find_hardware

    answer = find_hardware(on)
    rows = answer.to_rows()
    if not isinstance(answer, HardwareTable):
        rows = HardwareTable(devices=(answer,)).to_rows()
    with write_answer(answer, json) as console:
        for line in fit_table(rows, console.width):
            console.print(line)
    return 0


def fit_table(rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table with as many of its first columns as fit a width.

    Counts of parameters are rounded where the whole table is too wide; the last line names the
    columns that are left out.
    """
    from moewright.spec.record import format_table, list_columns

    lines = format_table(rows)
    if max(map(len, lines), default=0) <= width:
        return lines
    short = [{name: _shorten(value) for name, value in row.items()} for row in rows]
    columns = list_columns(rows)
    for count in range(len(columns) - 1, 0, -1):
        kept = [{name: row.get(name, "") for name in columns[:count]} for row in short]
        lines = format_table(kept)
        if max(map(len, lines)) <= width:
            break
    rest = f"left out here: {', '.join(columns[count:])} (--json - has all)"
    return [*lines, *wrap(rest, width, break_long_words=False)]


def _shorten(value: object) -> object:
    """Return a count of parameters in billions, anything else as it is."""
    from moewright.spec.units import format_figures

    if isinstance(value, int) and value > GIGA // 10:
        return f"{format_figures(value / GIGA)}B"
    return value


Shell = Literal["bash", "zsh", "fish"]

# Options whose values are hardware, and those whose values are layouts.
_HARDWARE = "on"
_LAYOUTS = ("layout", "why-not")
# Of verbs whose first word is a model, as their help names it.
_MODEL_HELP = "A model's name"
_MODEL_VERBS = ("plan", "estimate", "budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """The names that are offered as words of a shell."""

    models: str
    devices: str
    keys: str


def build_completion_verb(app: App) -> Callable[[Shell], int]:
    """Return the verb that prints how a shell completes the verbs of `app`."""

    def completion(shell: Shell, /) -> int:
        """Print the script by which a shell completes verbs, options, models, devices and layouts.

        bash: moewright completion bash > ~/.local/share/bash-completion/completions/moewright.
        zsh: moewright completion zsh > a folder of $fpath, as _moewright.
        fish: moewright completion fish > ~/.config/fish/completions/moewright.fish.

        Parameters
        ----------
        shell
            The shell.
        """
        script = app.generate_completion(prog_name="moewright", shell=shell)
        print(_ADD_NAMES[shell](script, _collect_names()), end="")
        return 0

    return completion


def _collect_names() -> _Names:
    from moewright.codec.layout_text import FIELD_OF_KEY
    from moewright.intake.catalogue import hardware_names, model_names
    from moewright.spec.choices import FieldKind

    # A name with blanks would be several words to a shell.
    models = sorted({name.rpartition("/")[2] for name in model_names() if " " not in name})
    is_number = {key: field.kind is FieldKind.NUMBER for key, field in FIELD_OF_KEY.items()}
    # A number stands right behind its key (tp2), anything else behind "=".
    keys = [key if is_number[key] else f"{key}=" for key in FIELD_OF_KEY]
    lists = (models, hardware_names(), keys)
    words = [" ".join(map(quote, names)) for names in lists]
    return _Names(models=words[0], devices=words[1], keys=words[2])


def _add_to_bash(script: str, names: _Names) -> str:
    """Put a function before that of cyclopts, which completes all else."""
    layouts = "|".join(f"--{option}" for option in _LAYOUTS)
    wrapper = f"""
_moewright_names() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" fixed=""
  case "$before" in
    --{_HARDWARE})
      [[ "$current" =~ ^[0-9]+x ]] && fixed="${{BASH_REMATCH[0]}}"
      COMPREPLY=($(compgen -P "$fixed" -W "{names.devices}" -- "${{current#"$fixed"}}"))
      return ;;
    {layouts})
      [[ "$current" == *,* ]] && fixed="${{current%,*}},"
      COMPREPLY=($(compgen -P "$fixed" -W "{names.keys}" -- "${{current##*,}}"))
      compopt -o nospace 2>/dev/null
      return ;;
    {"|".join(_MODEL_VERBS)})
      if [[ $COMP_CWORD -eq 2 && "$current" != -* ]]; then
        COMPREPLY=($(compgen -W "{names.models}" -- "$current") $(compgen -f -- "$current"))
        return
      fi ;;
  esac
  _moewright "$@"
}}
"""
    registration = "complete -F _moewright moewright"
    return script.replace(registration, f"{wrapper}\n{registration.replace(' moe', '_names moe')}")


def _add_to_zsh(script: str, names: _Names) -> str:
    """Name the function that completes a value at the end of each of its specifications."""
    functions = f"""
_moewright_models() {{ compadd -- {names.models}; _files }}
_moewright_devices() {{ compset -P '[0-9]*x'; compadd -- {names.devices} }}
_moewright_layouts() {{ compset -P '*,'; compadd -S '' -- {names.keys} }}
"""
    kinds = {_HARDWARE: "devices"} | dict.fromkeys(_LAYOUTS, "layouts")
    for option, kind in kinds.items():
        script = re.sub(
            rf"(--{option}\[[^\n]*\]:{option})' \\", rf"\1:_moewright_{kind}' \\", script
        )
    model_help = re.escape(_MODEL_HELP.replace("'", r"'\''"))
    script = re.sub(rf"('1:{model_help}[^\n]*)' \\", r"\1:_moewright_models' \\", script)
    head, _, rest = script.partition("\n")
    return f"{head}\n{functions}{rest}"


def _add_to_fish(script: str, names: _Names) -> str:
    """Give the options their values, and the verbs with a model its names."""
    functions = f"""
function __moewright_devices
    set -l count (string match -r '^[0-9]+x' -- (commandline -ct))
    for name in {names.devices}
        echo "$count"$name
    end
end
function __moewright_layouts
    set -l before (string match -r '^.*,' -- (commandline -ct))
    for key in {names.keys}
        echo "$before"$key
    end
end
"""
    kinds = {_HARDWARE: "devices"} | dict.fromkeys(_LAYOUTS, "layouts")
    for option, kind in kinds.items():
        script = re.sub(rf"-l {option} -r\b", f"-l {option} -x -a '(__moewright_{kind})'", script)
    models = "".join(
        f"complete -c moewright -n '__fish_moewright_using_command {verb}' -a {quote(names.models)}"
        "\n"
        for verb in _MODEL_VERBS
    )
    return f"{script}{functions}{models}"


_ADD_NAMES: Mapping[Shell, Callable[[str, _Names], str]] = MappingProxyType(
    {"bash": _add_to_bash, "zsh": _add_to_zsh, "fish": _add_to_fish}
)
