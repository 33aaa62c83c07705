"""`moewright completion`: a script for each shell, made without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from moewright.cli.main import main

VERBS = ("plan", "estimate", "train", "bench", "sweep", "hardware", "completion")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_verbs_and_options(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*VERBS, "global-batch", "megatron"):
        assert word in script
    path = tmp_path / "script"
    path.write_text(script)
    if which(shell):
        done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("est", ["estimate"]),
        ("plan Qwen3-30B", ["Qwen3-30B-A3B"]),
        ("plan Qwen3-30B-A3B --on 16xMI3", ["16xMI300X", "16xMI325X", "16xMI355X"]),
        ("estimate X --layout tp2,rec", ["tp2,recompute="]),
        ("plan X --precision mx", ["mxfp8"]),
    ],
)
def test_bash_completes(
    typed: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "moewright.bash"
    script.write_text(capsys.readouterr().out)
    words = ["moewright", *typed.split()]
    program = (
        f"source {script}\n"
        "name=$(complete -p moewright | sed -E 's/.*-F ([^ ]+).*/\\1/')\n"
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        f'"$name" moewright {words[-1]} {words[-2]}; echo "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_options_name_what_completes_their_values(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    lines = capsys.readouterr().out.splitlines()
    option = "--on[" if shell == "zsh" else "-l on "
    of_option = [line for line in lines if option in line]
    assert len(of_option) > 5
    assert all("_moewright_devices" in line for line in of_option)
    assert sum("_moewright_layouts" in line for line in lines) > 3
    assert sum("Qwen3-30B-A3B" in line for line in lines) >= (3 if shell == "fish" else 1)


def test_it_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from moewright.cli.main import main\n"
        "main(['completion', 'bash'])\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "False\n"


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
