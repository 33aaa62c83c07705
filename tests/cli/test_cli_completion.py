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


def test_bash_completes_a_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "moewright.bash"
    script.write_text(capsys.readouterr().out)
    program = (
        f"source {script}\n"
        "name=$(complete -p moewright | sed -E 's/.*-F ([^ ]+).*/\\1/')\n"
        "COMP_WORDS=(moewright est); COMP_CWORD=1; COMP_LINE='moewright est'; COMP_POINT=13\n"
        '"$name" moewright est moewright; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["estimate"]


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
