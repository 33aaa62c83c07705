"""`moewright finetune`: from a folder and chats to a folder that transformers answers with."""

from __future__ import annotations

import json
import shutil
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import safetensors.torch
import torch

import tiny_jobs
from moewright.api.converting import plan_export
from moewright.cli.main import main
from moewright.codec import write_toml
from moewright.engine.run.generate import AnsweringModel
from moewright.intake import hf
from moewright.spec.errors import BadInput

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "machine.toml"
    write_toml(path, tiny_jobs._hardware(2))
    return path


@pytest.fixture(scope="module")
def run(hardware: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of the model and the chats that moewright brings, shortened to 30 steps."""
    out = tmp_path_factory.mktemp("finetune") / "run"
    arguments = ["finetune", "--out", str(out), "--on", f"2x{hardware}"]
    assert main([*arguments, "--set", "train.steps=30", "--set", "train.warmup_steps=2"]) == 0
    return out


def test_the_run_learns_and_its_export_answers_in_transformers_as_here(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    steps = tiny_jobs.read_steps(run)
    assert len(steps) == 30
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    folder = run / "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 plus 3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    expected = model.generate(**prompt, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    stop = model.generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(stop) == "<|im_end|>"
    answering = AnsweringModel(hf.read_config(folder), folder)
    tokens = prompt["input_ids"][0].tolist()
    answer = list(answering.generate(tokens, new_tokens=12, stops=(stop,)))
    assert answer == [token for token in expected.tolist() if token != stop]
    card = (folder / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "30 steps" in card


@pytest.mark.thorough
def test_a_mixture_by_weights_is_trained_in_one_call_and_ends_in_six_lines(
    run: Path, hardware: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = files("moewright.api").joinpath("starter/chats.jsonl").read_text().splitlines()
    for name, kept in (("long", lines[:150]), ("short", lines[150:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(kept))
    chats = f"3 {tmp_path / 'long.jsonl'} 1 {tmp_path / 'short.jsonl'}"
    out = tmp_path / "out"
    command = ["finetune", str(run / "base"), chats, "--out", str(out), "--on", f"1x{hardware}"]
    assert main([*command, "--set", "train.steps=2", "--global-batch", "4"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("75.0% of each step from long.jsonl") for line in told)
    named = [line.split()[0] for line in told]
    place = named.index("learned")
    assert named[place : place + 6] == ["learned", "speed", "wall", "health", "kept", "next"]
    assert f"moewright chat {out}" in told[place + 5]
    assert (out / "report.html").is_file()
    job = tomllib.loads((out / "finetune.toml").read_text())
    assert job["data"]["train"] == "3 data/1/train 1 data/2/train"
    assert main(["finetune", str(run / "base"), "1 a.jsonl 2", "--out", str(out)]) == 2
    assert "in which weights and paths take turns" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_same_call_goes_on_and_exports_again(run: Path, hardware: Path) -> None:
    arguments = ["finetune", "--out", str(run), "--on", f"2x{hardware}"]
    assert main([*arguments, "--set", "train.steps=30", "--set", "train.warmup_steps=2"]) == 0
    assert len(tiny_jobs.read_steps(run)) == 30
    assert (run / "hf" / "model.safetensors").is_file()


@pytest.mark.core
def test_adapters_are_loaded_by_peft_and_equal_the_merged_weights(
    hardware: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    out = tmp_path / "run"
    arguments = ["finetune", "--out", str(out), "--on", f"1x{hardware}", "--lora", "r=8"]
    settings = ("train.steps=4", "train.lr=1e-2", "train.precision=fp32")
    assert main([*arguments, *(word for text in settings for word in ("--set", text))]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(1, 49).view(2, 24) * 7 % 600
    with torch.no_grad():
        base = load(out / "base", dtype="float32")
        plain = base(ids).logits
        merged = load(out / "hf", dtype="float32")(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, out / "adapter")(ids).logits
    assert float((merged - plain).norm() / plain.norm()) > 1e-2
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    other = tmp_path / "other"
    plan = json.loads((out / "plan.json").read_text())
    shutil.copytree(plan["workload"]["weights"], other)
    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    safetensors.torch.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    plan["workload"]["weights"] = str(other)
    (out / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(BadInput, match="is not the base that the adapters of"):
        plan_export(out).run(tmp_path / "merged", lambda _nbytes: None)
    assert not (tmp_path / "merged").exists()


def test_a_model_without_chats_and_a_sample_too_long_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = run / "base"
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": role, "content": "many words " * 40} for role in ("user", "assistant")]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    out = tmp_path / "out"
    config = json.loads((base / "config.json").read_text())
    small = tmp_path / "small"
    shutil.copytree(base, small)
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 500}))
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    (bare / "model.safetensors").unlink()
    for arguments, message in (
        ([str(base)], "chats: is needed with a model"),
        ([str(small), str(chats)], "tokenizer.json: its vocabulary has 640 ids, more than the"),
        ([str(bare), str(chats)], "model.safetensors: no such file"),
        ([str(base), str(chats), "--set", "train.lr=-1"], "train.lr=-1: must be in"),
        ([str(base), str(chats), "--heldout", "0.9"], "heldout_fraction=0.9: must be"),
        ([str(base), str(chats), "--seq-len", "64", "--heldout", "0"], "chats.jsonl:1: gives a"),
        (["--set", "train.lr=-1"], "train.lr=-1: must be in"),
        (["--freeze", "rooter"], "--freeze=rooter: must be parts, by commas, of embeddings,"),
        ([str(base), str(chats), "--epochs", "-1", "--heldout", "0"], "--epochs=-1: must be"),
        ([str(tmp_path), str(chats)], "config.json: no such file"),
    ):
        assert main(["finetune", *arguments, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
