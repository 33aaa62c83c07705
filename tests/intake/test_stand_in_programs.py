"""Commands that scripts would start, recorded by stand-ins while bash runs the script."""

import os
import shutil
import subprocess
import sys

import pytest

from moewright.intake.megatron.stand_in_programs import record_commands
from moewright.spec.errors import BadInput

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def recorded(text, tmp_path, shell="bash"):
    script = tmp_path / "run.sh"
    script.write_text(text)
    return [command.words for command in record_commands((shell, str(script)))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('torchrun --x "a b" ""', ("torchrun", "--x", "a b", "")),
        ("export PATH=/usr/bin:/bin\npython train.py", ("python", "train.py")),
        (f"{sys.executable} train.py --a", ("python", "train.py", "--a")),
        (f"PY={sys.executable}\n$PY train.py > /dev/null 2>&1", ("python", "train.py")),
        ('srun -N 2 bash -c "torchrun p.py"', ("srun", "-N", "2", "bash", "-c", "torchrun p.py")),
        ("f() { torchrun $1; }\nf p.py", ("torchrun", "p.py")),
        ("( cd /tmp; torchrun p.py )", ("torchrun", "p.py")),
        ("set -euo pipefail\nsleep 1000\npip install x\ntorchrun p.py", ("torchrun", "p.py")),
        ("X=$(python3 -c 'print(2 * 2)')\ntorchrun --tp $X", ("torchrun", "--tp", "4")),
        ("nohup torchrun p.py &\nwait", ("torchrun", "p.py")),
    ],
)
def test_what_would_train_is_recorded_and_not_started(text, words, tmp_path):
    (command,) = recorded(text, tmp_path)
    name = os.path.basename(words[0]) if words[0].startswith("python") else words[0]
    assert command[0].startswith(name)
    assert command[1:] == words[1:]


def test_the_environment_comes_with_it(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('export CUDA_DEVICE_MAX_CONNECTIONS=1\nX="a\nb" torchrun p.py\n')
    (command,) = record_commands(("bash", str(script)))
    assert command.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert command.environment["X"] == "a\nb"
    assert "BASH_ENV" not in command.environment


def test_a_plain_shell_finds_the_stand_ins_on_its_path(tmp_path):
    assert recorded("torchrun p.py\n", tmp_path, shell="sh") == [("torchrun", "p.py")]


def test_a_command_that_does_not_end_is_refused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("while true; do :; done\n")
    with pytest.raises(BadInput, match="has not ended after 1 s"):
        record_commands(("bash", str(script)), seconds=1)


def test_a_command_that_does_not_exist_is_refused():
    with pytest.raises(BadInput, match=r"command=no-such-program: cannot be started"):
        record_commands(("no-such-program",))


def test_nothing_of_the_machine_is_started(tmp_path):
    """A trainer that would leave a file leaves none."""
    trainer = tmp_path / "train.py"
    trainer.write_text(f"open({str(tmp_path / 'started')!r}, 'w')\n")
    recorded(f"{sys.executable} {trainer}\npython {trainer}\n", tmp_path)
    assert not (tmp_path / "started").exists()
    subprocess.run([sys.executable, str(trainer)], check=True)
    assert (tmp_path / "started").exists()
