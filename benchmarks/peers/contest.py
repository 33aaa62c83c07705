"""A contest of trainers on this machine: each in a process of its own, compared round by round.

Peers are installed as they ship, each into an environment of its own that lends this one's torch;
one that cannot be had is left out by name. All run with the same threads, which wait only shortly
before they sleep: long spins between turns would take the cores from whoever's turn it is.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import moewright
from moewright.spec.errors import BadInput, Reason

# bf16 products of a new shape cost most in the first rounds.
WARM_UP_ROUNDS = 4
ROUNDS = 9
# Where `benchmarks` lies, and where `moewright` does.
_CODE_FOLDERS = (Path(__file__).resolve().parents[2], Path(moewright.__file__).resolve().parents[1])
_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "10000",
    "DS_ACCELERATOR": "cpu",
    "TRANSFORMERS_VERBOSITY": "error",
}
_INSTALL_LIMIT_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A module of benchmarks.peers that takes turns, with what pip installs for it."""

    name: str
    module: str
    requirements: str = ""  # none when this environment has all


ENGINE = Contestant(name="moewright", module="moewright_engine")
GEMM = Contestant(name="best GEMM", module="gemm")
PEERS = (
    Contestant(
        name="transformers grouped_mm", module="transformers_moe", requirements="transformers"
    ),
    Contestant(
        name="DeepSpeed MoE in transformers",
        module="deepspeed_moe",
        requirements="deepspeed transformers",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTimes:
    """Seconds of one contestant by round, and what each turn computed."""

    name: str
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    @property
    def median_value(self) -> float:
        return statistics.median(self.values)

    def speedup_over(self, other: TurnTimes) -> tuple[float, float, float]:
        """Return how many times faster this one is, paired by round: median, least, most."""
        ratios = [other_s / own_s for own_s, other_s in zip(self.wall_s, other.wall_s, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def prepare_environment(contestant: Contestant, folder: Path) -> Path:
    """Return the Python that runs a contestant, whose environment is made the first time.

    The environment lies under `folder` and lends this one's packages.

    Raises:
        BadInput: The environment cannot be made; the reason is in it.
    """
    if not contestant.requirements:
        return Path(sys.executable)
    home = folder / contestant.module
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run_install([sys.executable, "-m", "venv", str(home)], contestant)
    site_packages = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    # Python reads no .pth files in a folder that is itself named by one, so the code of an editable
    # install is named here as well.
    lent = dict.fromkeys((sysconfig.get_path("purelib"), *map(str, _CODE_FOLDERS)))
    Path(site_packages, "lender.pth").write_text("\n".join(lent) + "\n")
    pip_install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run_install([*pip_install, *contestant.requirements.split()], contestant)
    (home / "ready").touch()
    return python


def run_contest(
    pythons: Mapping[Contestant, Path],
    *,
    part: str,
    dtype: str,
    threads: int,
    environment: Mapping[str, str],
) -> tuple[tuple[TurnTimes, ...], Mapping[str, float]]:
    """Run ROUNDS rounds in which each contestant has its turn, after warm-up rounds.

    Returns the times of each contestant, and the seconds of one more turn of the engine by kind
    of work.

    Raises:
        BadInput: A contestant failed.
    """
    environment = {**environment, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    arguments = (part, dtype, str(threads))
    processes = {
        contestant.name: _start(contestant, python, arguments, environment)
        for contestant, python in pythons.items()
    }
    answers: dict[str, list[Mapping[str, float]]] = {name: [] for name in processes}
    try:
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            for name, process in processes.items():
                answer = _request_turn(name, process, "go")
                if number >= WARM_UP_ROUNDS:
                    answers[name].append(answer)
        engine_split = _request_turn(ENGINE.name, processes[ENGINE.name], "split")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    times = tuple(
        TurnTimes(
            name=name,
            wall_s=tuple(turn["wall_s"] for turn in turns),
            cpu_s=tuple(turn["cpu_s"] for turn in turns),
            values=tuple(turn["value"] for turn in turns),
        )
        for name, turns in answers.items()
    )
    return times, engine_split


def _start(
    contestant: Contestant, python: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    command = [str(python), "-m", f"benchmarks.peers.{contestant.module}", *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=_CODE_FOLDERS[0],
    )


def _request_turn(name: str, process: subprocess.Popen[str], line: str) -> Mapping[str, float]:
    """Send a line to a contestant and return what it answers, one JSON object.

    Raises:
        BadInput: The contestant ended instead.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        while output := process.stdout.readline():
            # Some print more than they are asked for.
            if output.startswith("{"):
                answer: Mapping[str, float] = json.loads(output)
                return answer
    except BrokenPipeError:
        pass
    process.kill()
    _, errors = process.communicate()
    raise BadInput(Reason(field=name, rule=f"it failed: {_last_line(errors)}"))


def _run_install(command: Sequence[str], contestant: Contestant) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        rule = f"not installed within {_INSTALL_LIMIT_S} s"
        raise BadInput(Reason(field=contestant.name, rule=rule)) from None
    if done.returncode:
        rule = f"it cannot be had here: {_last_line(done.stderr)}"
        raise BadInput(Reason(field=contestant.name, rule=rule))


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "no word"
