"""`moewright completion`: what a shell needs to complete verbs and options."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script by which a shell completes verbs, options and their choices.

    bash: moewright completion bash > ~/.local/share/bash-completion/completions/moewright.
    zsh: moewright completion zsh > a folder of $fpath, as _moewright.
    fish: moewright completion fish > ~/.config/fish/completions/moewright.fish.

    Parameters
    ----------
    shell
        The shell.
    """
    from moewright.cli.verbs import build_app

    print(build_app().generate_completion(prog_name="moewright", shell=shell), end="")
    return 0
