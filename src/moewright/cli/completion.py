"""`moewright completion`: what a shell needs to complete verbs and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]


def build_completion_verb(app: App) -> Callable[[Shell], int]:
    """Return the verb that prints how a shell completes the verbs of `app`."""

    def completion(shell: Shell, /) -> int:
        """Print the script by which a shell completes verbs, options and their choices.

        bash: moewright completion bash > ~/.local/share/bash-completion/completions/moewright.
        zsh: moewright completion zsh > a folder of $fpath, as _moewright.
        fish: moewright completion fish > ~/.config/fish/completions/moewright.fish.

        Parameters
        ----------
        shell
            The shell.
        """
        print(app.generate_completion(prog_name="moewright", shell=shell), end="")
        return 0

    return completion
