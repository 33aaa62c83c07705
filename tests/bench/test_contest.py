"""The contest: turns of the engine and of transformers on one model, and peers that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import contest
from moewright.spec.errors import BadInput

pytest.importorskip("transformers")


@pytest.mark.thorough
@pytest.mark.turns
def test_two_trainers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained, both give every word the same chance: a loss of ln(8192) = 9.01 and some more."""
    monkeypatch.setattr(contest, "WARM_UP_ROUNDS", 0)
    monkeypatch.setattr(contest, "ROUNDS", 1)
    python = Path(sys.executable)
    peer = replace(contest.PEERS[0], requirements="")
    pythons = {
        contest.ENGINE: contest.prepare_environment(contest.ENGINE, python),
        peer: contest.prepare_environment(peer, python),
    }
    times, split = contest.run_contest(
        pythons, part="step", dtype="bf16", threads=1, environment=os.environ
    )
    assert [trainer.name for trainer in times] == [contest.ENGINE.name, peer.name]
    assert all(9.01 < trainer.values[0] < 9.3 for trainer in times)
    engine_times, peer_times = times
    median, least, most = engine_times.speedup_over(peer_times)
    assert median == least == most == peer_times.wall_s[0] / engine_times.wall_s[0]
    assert split["products"] > 0.2 * sum(split.values())


def test_a_peer_that_fails_is_named_with_its_reason() -> None:
    absent = contest.Contestant(name="nobody", module="nobody")
    with pytest.raises(
        BadInput, match=r"nobody: it failed: .*No module named benchmarks\.peers\.nobody"
    ):
        contest.run_contest(
            {absent: Path(sys.executable)},
            part="step",
            dtype="fp32",
            threads=1,
            environment=os.environ,
        )


@pytest.mark.thorough
@pytest.mark.turns
def test_a_peer_that_cannot_be_had_is_named_with_its_reason(tmp_path: Path) -> None:
    absent = contest.Contestant(
        name="nobody", module="nobody", requirements=str(tmp_path / "no-such-package")
    )
    with pytest.raises(BadInput, match="nobody: it cannot be had here"):
        contest.prepare_environment(absent, tmp_path / "peers")
    assert not (tmp_path / "peers" / "nobody" / "ready").exists()


@pytest.mark.thorough
def test_a_peers_environment_finds_our_code(tmp_path: Path) -> None:
    contestant = contest.Contestant(name="none", module="none", requirements="pip")
    python = contest.prepare_environment(contestant, tmp_path / "peers")
    subprocess.run(
        [str(python), "-c", "import benchmarks.peers.protocol, moewright, torch"],
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        check=True,
    )


@pytest.mark.turns
@pytest.mark.parametrize("module", ["engine", "peers", "tuning"])
def test_a_benchmark_is_a_command_that_explains_itself_and_refuses_in_one_line(
    module: str,
) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    root = Path(contest.__file__).parents[2]
    shown = subprocess.run(
        [*command, "--help"], cwd=root, capture_output=True, text=True, check=True
    )
    assert f"Usage: python -m benchmarks.{module}" in shown.stdout
    refused = subprocess.run(
        [*command, "--no-such-option", "1"], cwd=root, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
