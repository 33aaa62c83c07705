"""The contest: turns of the engine and of transformers on the same model, and a peer that is not
there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moewright.bench import contest
from moewright.spec.errors import BadInput

pytest.importorskip("transformers")


def test_two_trainers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained, both give every word the same chance: a loss of ln(8192) = 9.01 and a little
    more."""
    monkeypatch.setattr(contest, "WARM_UP_ROUNDS", 0)
    monkeypatch.setattr(contest, "ROUNDS", 1)
    here = Path(sys.executable)
    peer = replace(contest.PEERS[0], requirements="")
    ready = {
        contest.ENGINE: contest.prepare_environment(contest.ENGINE, here),
        peer: contest.prepare_environment(peer, here),
    }
    turns, split = contest.run_contest(
        ready, part="step", dtype="bf16", threads=1, environment=os.environ
    )
    assert [one.name for one in turns] == [contest.ENGINE.name, peer.name]
    assert all(9.01 < one.values[0] < 9.3 for one in turns)
    ours, theirs = turns
    median, least, most = ours.speedup_over(theirs)
    assert median == least == most == theirs.wall_s[0] / ours.wall_s[0]
    assert split["products"] > 0.2 * sum(split.values())


def test_a_peer_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    absent = contest.Contestant(name="nobody", module="nobody")
    with pytest.raises(
        BadInput, match=r"nobody: it failed: .*No module named moewright\.bench\.peers\.nobody"
    ):
        contest.run_contest(
            {absent: Path(sys.executable)},
            part="step",
            dtype="fp32",
            threads=1,
            environment=os.environ,
        )


def test_a_peer_that_cannot_be_had_is_named_with_its_reason(tmp_path: Path) -> None:
    nowhere = contest.Contestant(
        name="nobody", module="nobody", requirements=str(tmp_path / "no-such-package")
    )
    with pytest.raises(BadInput, match="nobody: it cannot be had here"):
        contest.prepare_environment(nowhere, tmp_path / "peers")
    assert not (tmp_path / "peers" / "nobody" / "ready").exists()


def test_a_peers_environment_finds_our_code(tmp_path: Path) -> None:
    python = contest.prepare_environment(
        contest.Contestant(name="none", module="none", requirements="pip"), tmp_path / "peers"
    )
    bare = {"PATH": os.environ["PATH"]}
    subprocess.run(
        [str(python), "-c", "import moewright.bench.peers.contest, torch"], env=bare, check=True
    )
