"""The step recorder beside trainers of the three kinds, and the watch of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moewright as mw
from moewright.cli.main import main
from moewright.exporters import step_recorder


class TopKRouter(torch.nn.Module):
    """A router that returns what Megatron-LM's returns."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing_map = torch.zeros(len(tokens), 4, dtype=torch.bool)
        routing_map[:, 1] = True
        return routing_map.float(), routing_map


class TokenChoiceTopKRouter(torch.nn.Module):
    """A router that returns what torchtitan's returns."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = torch.full((len(tokens), 2), 3)
        return torch.ones(len(tokens), 2), chosen, torch.ones(len(tokens), 4)


def read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"rank{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def use_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    """Make a module of a trainer importable, its packages too."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(
            sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end]))
        )
    module = sys.modules[name]
    for key, value in members.items():
        setattr(module, key, value)
    return module


def test_it_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, runpy\n"
        f"runpy.run_path({step_recorder.__file__!r})\n"
        "assert not {'torch', 'numpy', 'moewright'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_megatron_lms_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleDict({"router": TopKRouter()})

    def train_step(
        _forward: Any, data: Iterator[int], models: Any, *_rest: Any, iteration: int | None = None
    ) -> int:
        value = next(data)
        models[0]["router"](torch.ones(6, 8))
        return value

    training = use_module(
        monkeypatch,
        "megatron.training.training",
        train_step=train_step,
        get_args=lambda: types.SimpleNamespace(iteration=10),
    )
    recorder = step_recorder.record_megatron(tmp_path, experts=True, probe_every=2)
    data = iter(range(4))
    results = [training.train_step(None, data, [model], None, None, None, None) for _ in range(4)]
    recorder.close()
    assert results == [0, 1, 2, 3]  # nothing of the step has changed
    rows = read(tmp_path)
    assert [row["recorded_step"] for row in rows] == [11, 12, 13, 14]
    assert all(row["step_s"] >= row["call_s"] >= row["data_s"] > 0 for row in rows)
    assert [("probe_s" in row) for row in rows] == [False, True, False, True]
    assert [row.get("expert_tokens") for row in rows] == [
        None,
        {"0.router": [0, 6, 0, 0]},
        None,
        {"0.router": [0, 6, 0, 0]},
    ]


def test_iterators_keep_their_type(tmp_path: Path) -> None:
    """Megatron-LM's check of a rerun refuses another one."""

    class RerunDataIterator:
        def __init__(self) -> None:
            self.rest = [1, 2, 3]

        def __next__(self) -> int:
            return self.rest.pop()

    recorder = step_recorder.StepRecorder(tmp_path)
    iterator = RerunDataIterator()
    for expected in (3, 2):
        timed = recorder.time_data([iterator, None])
        assert timed == [iterator, None]
        assert isinstance(timed[0], RerunDataIterator)
        assert next(timed[0]) == expected
        recorder.step(expected)
    assert list(recorder.time_data(value for value in (4, 5))) == [4, 5]
    recorder.close()
    assert all(row["data_s"] > 0 for row in read(tmp_path))


def test_bridges_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(train_state=types.SimpleNamespace(step=7))
    training = use_module(
        monkeypatch, "megatron.bridge.training.train", train_step=lambda *args: len(args)
    )
    recorder = step_recorder.record_bridge(tmp_path)
    assert training.train_step(None, [iter([1]), None], [], None, None, state) == 6
    recorder.close()
    assert [row["recorded_step"] for row in read(tmp_path)] == [8]


def test_torchtitans_steps_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        step = 0
        model_parts = (torch.nn.ModuleDict({"router": TokenChoiceTopKRouter()}),)

        def train_step(self, data: Iterator[int]) -> None:
            next(data)
            self.model_parts[0]["router"](torch.ones(3, 8))

    use_module(monkeypatch, "torchtitan.trainer", Trainer=Trainer)
    recorder = step_recorder.record_torchtitan(tmp_path, experts=True, probe_every=2)
    trainer, data = Trainer(), iter(range(2))
    for trainer.step in (1, 2):
        trainer.train_step(data)
    recorder.close()
    rows = read(tmp_path)
    assert [row["recorded_step"] for row in rows] == [1, 2]
    assert rows[1]["expert_tokens"] == {"0.router": [0, 0, 0, 6]}


def write_ranks(folder: Path, *, slow: int = -1, starved: int = -1, steps: int = 240) -> None:
    folder.mkdir(parents=True)
    for rank in range(4):
        lines = []
        for step in range(1, steps + 1):
            row = {
                "format": 1,
                "rank": rank,
                "recorded_step": step,
                "step_s": 2.0 + 0.001 * (step % 7),
                "data_s": 0.2 if rank == starved else 0.01,
                "gc_s": 0.0,
                "peak_bytes": 10**9 + rank,
            }
            if step % 50 == 0:
                row["probe_s"] = 0.0012 if rank == slow else 0.001 + 1e-6 * rank
                row["expert_tokens"] = {"0.router": [100, 100, 100, 300]}
            lines.append(json.dumps(row) + "\n")
        (folder / f"rank{rank:05d}.jsonl").write_text("".join(lines))


def test_a_watch_names_a_slow_device_and_a_starved_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ranks(tmp_path / "sound")
    assert mw.watch(tmp_path / "sound").alarms == ()
    assert main(["watch", str(tmp_path / "sound"), "--once"]) == 0
    assert "4 recorded; the slowest device (rank 3) takes 1.00" in capsys.readouterr().out
    write_ranks(tmp_path / "slow", slow=2)
    shown = mw.watch(tmp_path / "slow")
    assert [(alarm.kind, alarm.text) for alarm in shown.alarms] == [
        ("straggler", "the device of rank 2 takes 20% longer for the same product")
    ]
    assert shown.peak_bytes == 10**9 + 3
    write_ranks(tmp_path / "starved", starved=1)
    assert main(["watch", str(tmp_path / "starved"), "--once"]) == 5
    out = capsys.readouterr().out
    assert "rank 1 waits for data 9% of a step longer than the others" in out


def test_records_beside_a_log_tell_hot_experts(tmp_path: Path) -> None:
    write_ranks(tmp_path / "records")
    lines = [
        f" iteration {step:8d}/ 1000 | elapsed time per iteration (ms): 2000.0 | "
        "global batch size:   512 | lm loss: 2.000000E+00 |\n"
        for step in range(1, 200)
    ]
    (tmp_path / "run.log").write_text("".join(lines))
    shown = mw.watch(
        tmp_path / "run.log", model="Qwen3-30B-A3B", on="16xH100", layout="ep2,recompute=full"
    )
    assert len(shown.ranks) == 4
    assert shown.imbalance == pytest.approx(400 / 300)
    (tmp_path / "records" / "rank00001.jsonl").write_text("[]\n{\n")
    assert len(mw.watch(tmp_path / "run.log").ranks) == 3
