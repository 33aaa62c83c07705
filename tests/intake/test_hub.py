"""Models by their hub id: the real client of the hub asks a stand-in of it on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from hub_server import REVISION, serve_hub
from moewright.cli.main import main
from moewright.intake import hub
from moewright.spec.errors import BadInput

pytestmark = pytest.mark.slow  # what its tests share takes seconds

pytest.importorskip("huggingface_hub")

# One process runs several commands: each start of Python with the hub's client takes a second.
_RUN_ALL = """
import contextlib, io, json, pathlib, sys
from moewright.cli.main import main
from moewright.intake.hub import locate_folder
results = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    results.append([code, out.getvalue(), err.getvalue()])
with contextlib.redirect_stderr(io.StringIO()):  # bars
    results.append([0, str(locate_folder(pathlib.Path("Org/Tiny-MoE"), "hf_dir")), ""])
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def run_all(commands: Sequence[Sequence[str]], endpoint: str, home: Path) -> list[Answer]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps(commands)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Answer(*result) for result in json.loads(done.stdout)]


REFUSALS = {
    "Org/gated": "accepted its terms",
    "Org/none": "has no such model",
    "Org/broken": "answered 500",
    "Org/empty": "without a config.json",
    "Qwen/Qwen3-30B-A3": "nearest legal value: Qwen/Qwen3-30B-A3B",
    "Org/unknown": "speech",
}
PLAN = ("estimate", "Org/Tiny-MoE", "--on", "1xH100")


@dataclass(frozen=True)
class Asked:
    """What one process was answered, and what it asked the hub for."""

    answers: list[Answer]
    requests: list[str]
    folder: Path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("hub")
    root = folder / "served"
    config = (resources.files("moewright.api") / "starter" / "config.json").read_text("utf-8")
    (root / "Org/Tiny-MoE").mkdir(parents=True)
    for file in ("model.safetensors", "tokenizer.json", "original.bin"):
        (root / "Org/Tiny-MoE" / file).write_text(file, "utf-8")
    (root / "Org/Tiny-MoE/config.json").write_text(config, "utf-8")
    shutil.copytree(root / "Org/Tiny-MoE", root / "Org/gated")
    shutil.copytree(root / "Org/Tiny-MoE", root / "Org/unknown")
    unknown = {**json.loads(config), "model_type": "speech"}
    (root / "Org/unknown/config.json").write_text(json.dumps(unknown), "utf-8")
    (root / "Org/empty").mkdir()
    chats = folder / "chats.jsonl"
    chats.write_text("{}\n", "utf-8")
    out = str(folder / "out")
    commands = [
        PLAN,
        *(["estimate", name, "--on", "1xH100"] for name in REFUSALS),
        ["finetune", "Org/unknown", str(chats), "--out", out],
        ["convert", "import", "Org/none", "--out", out],
        ["data", "build", str(chats), "--tokenizer", "Org/none", "--out", out],
    ]
    requests: list[str] = []
    with serve_hub(root, requests) as endpoint:
        return Asked(run_all(commands, endpoint, folder / "home"), requests, folder)


def test_a_hub_id_is_planned_and_fetched_and_comes_from_the_cache_without_a_network(
    asked: Asked,
) -> None:
    planned, located = asked.answers[0], Path(asked.answers[-1].out)
    assert planned.code == 0, planned.err
    assert "Org/Tiny-MoE on 1 x H100" in planned.out
    assert not planned.err
    fetched = [line.rpartition("/")[2] for line in asked.requests if "GET /Org/Tiny" in line]
    assert fetched.count("config.json") == 1  # the second time it is in the cache
    assert "model.safetensors" in fetched
    assert "original.bin" not in fetched
    assert located == asked.folder / "home/hub/models--Org--Tiny-MoE/snapshots" / REVISION
    assert (located / "model.safetensors").read_text("utf-8") == "model.safetensors"
    commands = [PLAN, ["estimate", "Org/other", "--on", "1xH100"]]
    again, other, _ = run_all(commands, "http://127.0.0.1:9", asked.folder / "home")
    assert (again.code, again.out) == (0, planned.out)
    assert other.code == 2
    assert other.err.count("\n") == 1
    assert "127.0.0.1:9 cannot be reached" in other.err


def test_what_the_hub_does_not_give_is_refused_in_a_line_and_leaves_nothing(asked: Asked) -> None:
    wanted = [*REFUSALS.values(), "speech", "has no such model", "--tokenizer=Org/none"]
    for answer, text in zip(asked.answers[1:-1], wanted, strict=True):
        assert answer.code == 2
        assert answer.err.count("\n") == 1, answer.err
        assert text in answer.err
    assert not (asked.folder / "out").exists()
    # Weights of a model that nobody here can read are not fetched.
    assert not any("unknown" in line and "safetensors" in line for line in asked.requests)


def test_without_the_client_the_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["estimate", "Org/Tiny-MoE", "--on", "1xH100"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "huggingface_hub" in err
    assert "pip install 'moewright[hub]'" in err


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", True),
        ("Qwen3-30B-A3B", False),
        ("runs/first/hf", False),
        ("../weights", False),
        ("/weights", False),
        ("a/config.json", False),
        ("a/b c", False),
        ("tests/intake", False),  # a folder that there is, from where tests run
        ("a/b\0", False),
    ],
)
def test_paths_are_told_from_ids(text: str, is_id: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert hub.is_hub_id(text) is is_id


def test_known_names_and_variants_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b-thinking-2507", "DeepSeek-V3"):
        assert hub.locate_config(name) == name
    with pytest.raises(BadInput):
        hub.locate_config("Qwen/Qwen3-31B")
