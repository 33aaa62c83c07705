"""Training on preferences: as transformers' logits say, in any layout as in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layouts_equal import assert_same_training
from test_ledger_equal import assert_ledgers_equal
from torch.nn.functional import logsigmoid

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_preferences
from hf_families import save_gradients, write_model
from moewright.api.converting import plan_export
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.data.packing import open_chats
from moewright.engine.hf.names import family_name_table, join_hf_tensors, to_hf_tensors
from moewright.engine.run.reference_pass import REFERENCE_FILE
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.intake.hf import read_config
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DataSpec,
    DocumentMasking,
    Dtype,
    FineTuningSpec,
    LossSpec,
    Objective,
    RouterTraining,
    Task,
)
from selection import thorough
from tiny_jobs import read_state, read_steps

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn
SEQ_LEN = 192
BETA, SMOOTHING = 0.4, 0.1
LOSS = LossSpec(objective=Objective.DPO, dpo_beta=BETA, dpo_label_smoothing=SMOOTHING)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("pairs")
    source = write_preferences(folder / "pairs.jsonl", 60)
    options = ChatOptions(tokenizer=write_chat_folder(folder / "hf", CHATML), heldout_fraction=0.2)
    data = build_chats(source, folder / "data", options).data
    return replace(data, documents=DocumentMasking.RESTARTED)


def build_plan(data: DataSpec, layout: str, world_size: int, **changes: object) -> Plan:
    changes = {"loss": LOSS, "global_batch": 4} | changes
    workload = tiny_jobs.build_workload(data, steps=2, seq_len=SEQ_LEN, **changes)
    workload = replace(
        workload,
        checkpoint=replace(workload.checkpoint, every_steps=1, keep=2),
        optimizer=replace(workload.optimizer, warmup_steps=0),
    )
    return tiny_jobs.build_plan(workload, layout, world_size=world_size)


def read_evaluation(run: Path) -> dict[str, Any]:
    lines = map(json.loads, (run / "steps.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "eval"][-1]


def log_probabilities(model: torch.nn.Module, prefix: str) -> torch.Tensor:
    """Return the log-probabilities of a corpus' answers, [pairs, 2], one document at a time."""
    chats = open_chats(Path(prefix))
    sums = []
    for start, length in zip(chats.tokens.document_starts, chats.tokens.lengths, strict=True):
        place = slice(int(start), int(start + length))
        ids = torch.tensor(chats.tokens.tokens[place].astype("int64"))
        is_answer = torch.tensor(chats.learnt.tokens[place] == 1)
        logits = model(input_ids=ids[None]).logits[0]
        picked = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        sums.append((picked * is_answer[1:]).sum())
    return torch.stack(sums).view(-1, 2)


def trl_loss(policy: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return TRL's losses and reward margins of pairs, from log-probabilities [pairs, 2]."""
    logratios = policy[:, 0] - policy[:, 1]
    reference_logratios = reference[:, 0] - reference[:, 1]
    logits = BETA * (logratios - reference_logratios)
    return -logsigmoid(logits) * (1 - SMOOTHING) - logsigmoid(-logits) * SMOOTHING, logits


def load_model(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("family", ["qwen3_moe", thorough("deepseek_v4")])
def test_losses_and_gradients_are_those_of_transformers_logits(
    family: str, pairs: DataSpec, tmp_path: Path
) -> None:
    """A step on all pairs; the held-out ones are judged by the exported weights."""
    base = tmp_path / "base"
    write_model(family, base, vocab_size=tiny_jobs.VOCABULARY)
    plan = build_plan(pairs, "", 1, batch_samples=48, global_batch=2)
    workload = replace(
        plan.workload,
        weights=str(base),
        steps=1,
        eval_batches=2,  # of all held-out pairs
        router=RouterTraining(bias_update_rate=0.0),
    )
    plan = replace(plan, model=replace(read_config(base), mtp_layers=0), workload=workload)
    assert train(plan, tmp_path / "run") is ExitCode.DONE

    model = load_model(base)
    reference = log_probabilities(model, pairs.train)
    losses, _ = trl_loss(reference, reference.detach())
    losses.mean().backward()
    (step,) = read_steps(tmp_path / "run")
    assert step["loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-6)
    # In the reference a pair lies elsewhere in its sequence: windows round by that, and so do the
    # rows of a product on some CPUs (4e-9 on an Intel Xeon, 0 on an AMD EPYC).
    assert step["rewards"]["pairs"] == 48
    assert step["rewards"]["margin"] == pytest.approx(0.0, abs=1e-6)
    table = family_name_table(plan.model)
    prefix = "optim/exp_avg/"
    moments = read_state(tmp_path / "run", 1)
    gradients = join_hf_tensors(
        part
        for name, tensor in moments.items()
        if name.startswith(prefix)
        for part in to_hf_tensors(tensor / 0.1, table[name.removeprefix(prefix)])
    )
    checked = []
    for name, expected in save_gradients(model, tmp_path / "gradients").items():
        # An indexer has an objective of its own; biases and tables have no gradient.
        if name in gradients and ".indexer." not in name:
            torch.testing.assert_close(gradients[name], expected, rtol=2e-3, atol=2e-6)
            checked.append(name)
    assert len(checked) > 15

    plan_export(tmp_path / "run").run(tmp_path / "trained", lambda _nbytes: None)
    with torch.no_grad():
        reference = log_probabilities(model, pairs.heldout)
        policy = log_probabilities(load_model(tmp_path / "trained"), pairs.heldout)
    losses, margins = trl_loss(policy, reference)
    evaluation = read_evaluation(tmp_path / "run")
    assert evaluation["heldout_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert evaluation["rewards"]["margin"] == pytest.approx(float(margins.mean()), rel=1e-3)
    accuracy = float((margins > 0).double().mean())
    assert evaluation["rewards"]["accuracy"] == pytest.approx(accuracy)
    assert float(margins.abs().min()) > 0.0


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "tp2,cp2,ep2"),
        thorough(4, "pp2,ep2,layout='Et|ttL'"),
        thorough(4, "cp2,ep2,zero3,mbs2"),
        thorough(4, "etp2,ep2,recompute=full+loss"),
        thorough(2, "pp2,schedule=zb-h1,layout='Et|ttL'"),
        thorough(2, "cp2,cp_comm=a2a,ep2,overlap=grad+param"),
    ],
)
def test_preferences_train_as_one_process_does(
    world_size: int, layout: str, pairs: DataSpec, tmp_path: Path
) -> None:
    for name, plan in (
        ("one", build_plan(pairs, "", 1)),
        ("cut", build_plan(pairs, layout, world_size)),
    ):
        assert train(plan, tmp_path / name) is ExitCode.DONE
    assert_same_training(tmp_path / "cut", tmp_path / "one")
    for actual, expected in zip(
        (*read_steps(tmp_path / "cut"), read_evaluation(tmp_path / "cut")),
        (*read_steps(tmp_path / "one"), read_evaluation(tmp_path / "one")),
        strict=True,
    ):
        assert actual["rewards"] == pytest.approx(expected["rewards"], rel=1e-3, abs=1e-5)
    assert read_steps(tmp_path / "one")[-1]["loss"] < read_steps(tmp_path / "one")[0]["loss"]


def test_ledgers_of_preferences_are_equal(pairs: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(pairs, "cp2,ep2", 2, precision=Dtype.BF16)
    assert_ledgers_equal(plan, tmp_path)


def test_a_run_of_adapters_goes_on_against_the_reference_that_it_began_with(
    pairs: DataSpec, tmp_path: Path
) -> None:
    fine_tuning = FineTuningSpec(task=Task.LORA, lora_rank=4, lora_alpha=8.0)
    plan = build_plan(pairs, "", 1, fine_tuning=fine_tuning)
    assert train(plan, tmp_path / "whole") is ExitCode.DONE
    decayed = replace(
        plan.workload, optimizer=replace(plan.workload.optimizer, decay_steps=plan.workload.steps)
    )
    first = replace(plan, workload=replace(decayed, steps=1))
    assert train(first, tmp_path / "parts") is ExitCode.DONE
    # Adapters add nothing before their first update: the reference is the model without them.
    assert read_steps(tmp_path / "parts")[0]["rewards"]["margin"] == 0.0
    last = replace(plan, workload=decayed)
    reference = tmp_path / "parts" / REFERENCE_FILE
    moved = reference.rename(tmp_path / "moved")
    with pytest.raises(BadInput, match=rf"{REFERENCE_FILE}: holds the log-probabilities that"):
        train(last, tmp_path / "parts")
    moved.rename(reference)
    assert train(last, tmp_path / "parts") is ExitCode.DONE
    whole, parts = (read_steps(tmp_path / name) for name in ("whole", "parts"))
    assert [step["loss"] for step in parts] == [step["loss"] for step in whole]
    assert [step["rewards"] for step in parts] == [step["rewards"] for step in whole]
