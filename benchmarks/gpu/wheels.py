"""`python -m benchmarks.gpu.wheels DIR`: the wheels that a GPU machine without a network lacks.

The machine has torch, Triton and what tests/gpu needs, but not all that the package itself imports.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks.command import run_command
from moewright.spec.errors import BadInput, Reason

_ROOT = Path(__file__).parents[2]
# The machine's Python (of torch 2.11 with CUDA 13), and a libc that is no newer than its own.
_TARGET = ("--python-version", "3.12", "--implementation", "cp", "--platform")
_PLATFORM = "manylinux_2_28_x86_64"
_MOST_BYTES = 10**7
# What the machine has. A second copy would be imported in place of the one that its torch was
# tested with.
_PRESENT = (
    *("jinja2", "markdown_it_py", "markupsafe", "mdurl", "numpy", "pygments", "pyyaml", "rich"),
    "typing_extensions",
)


def gather_wheels(folder: Path, /) -> int:
    """Download the wheels of the package's own dependencies into a folder.

    Parameters
    ----------
    folder
        Where they go; `make gpu WHEELS=FOLDER` installs them without an index.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [name for name in project["dependencies"] if name not in _PRESENT]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += [*_TARGET, _PLATFORM, "--constraint", str(_ROOT / "constraints.txt")]
    done = subprocess.run([*command, "--dest", str(folder), *names], check=False)
    if done.returncode:
        rule = "pip could not download the wheels; it says why above"
        raise BadInput(Reason(field="make gpu-wheels", rule=rule))
    for path in folder.glob("*.whl"):
        if path.name.partition("-")[0].casefold() in _PRESENT:
            path.unlink()
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")
    if size > _MOST_BYTES:
        rule = f"wheels of {size} bytes are more than may travel"
        raise BadInput(Reason(field="make gpu-wheels", rule=rule, nearest=str(_MOST_BYTES)))
    return 0


if __name__ == "__main__":
    run_command("benchmarks.gpu.wheels", gather_wheels)
