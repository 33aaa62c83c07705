"""The engine against other trainers on this machine: each in a process of its own, in turns,
compared round by round.

Peers are installed as they ship, each into an environment of its own that lends this one's torch;
one that cannot be had is left out by name. All run with the same threads, which wait shortly before
they sleep: long spins between turns would take the cores from whoever's turn it is.
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

from moewright.spec.errors import BadInput, Reason

WARM_UP_ROUNDS, ROUNDS = 4, 9  # bf16 products of a new shape cost most in the first of them
_WAITS = {"GOMP_SPINCOUNT": "10000", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
_INSTALL_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """`module` of bench.peers runs it; `needs` is what pip installs for it, "" when this
    environment has all."""

    name: str
    module: str
    requirements: str = ""


ENGINE = Contestant(name="moewright", module="ours")
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

    def speedup_over(self, other: TurnTimes) -> tuple[float, float, float]:
        """How many times faster, paired by round: median, least, most."""
        ratios = [theirs / ours for ours, theirs in zip(self.wall_s, other.wall_s, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def prepare_environment(who: Contestant, folder: Path) -> Path:
    """The Python that runs a contestant; its environment is made under `folder` the first time.

    Raises BadInput with the reason when it cannot be had.
    """
    if not who.requirements:
        return Path(sys.executable)
    home = folder / who.module
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)], who)
    inside = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    # Where an editable install keeps our own code is said by a .pth of its own, which nobody reads
    # in a lent folder.
    ours = str(Path(__file__).resolve().parents[2])
    Path(inside, "lender.pth").write_text(
        "\n".join(dict.fromkeys((sysconfig.get_path("purelib"), ours))) + "\n"
    )
    _run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *who.requirements.split(),
        ],
        who,
    )
    (home / "ready").touch()
    return python


def run_contest(
    who: Mapping[Contestant, Path],
    *,
    part: str,
    dtype: str,
    threads: int,
    environment: Mapping[str, str],
) -> tuple[tuple[TurnTimes, ...], Mapping[str, float]]:
    """ROUNDS rounds in which each has its turn, after WARM_UP that do not count; and where the
    engine's time goes."""
    env = {**environment, **_WAITS, "OMP_NUM_THREADS": str(threads)}
    running = {
        one.name: _start(one, python, (part, dtype, str(threads)), env)
        for one, python in who.items()
    }
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in running}
    try:
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            for name, process in running.items():
                answer = _turn(name, process, "go")
                if number >= WARM_UP_ROUNDS:
                    found[name].append(answer)
        split = _turn(ENGINE.name, running[ENGINE.name], "split")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    turns = tuple(
        TurnTimes(
            name=name,
            wall_s=tuple(one["wall_s"] for one in answers),
            cpu_s=tuple(one["cpu_s"] for one in answers),
            values=tuple(one["value"] for one in answers),
        )
        for name, answers in found.items()
    )
    return turns, split


def _start(
    who: Contestant, python: Path, asked: Sequence[str], env: Mapping[str, str]
) -> subprocess.Popen[str]:
    command = [str(python), "-m", f"moewright.bench.peers.{who.module}", *asked]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def _turn(name: str, process: subprocess.Popen[str], line: str) -> Mapping[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        while said := process.stdout.readline():
            if said.startswith("{"):  # some print more than they are asked for
                answer: Mapping[str, float] = json.loads(said)
                return answer
    except BrokenPipeError:
        pass
    process.kill()
    _, wrong = process.communicate()
    raise BadInput(
        Reason(field=name, rule=f"it failed: {(wrong.strip().splitlines() or ['no word'])[-1]}")
    )


def _run(command: Sequence[str], who: Contestant) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            Reason(field=who.name, rule=f"not installed within {_INSTALL_S} s")
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise BadInput(Reason(field=who.name, rule=f"it cannot be had here: {last}"))
