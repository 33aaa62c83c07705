"""The workload of a question: what a job or a model brings, and what options change."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import moewright as mw
from moewright.api.planning import estimate_request
from moewright.api.requests import change_training, read_lora_rank, read_plan_request
from moewright.codec import write_json
from moewright.spec.ledger import Component
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import BaseQuantization, Task, Workload


def estimate(options: WorkloadOptions, model: str | Path = "Mixtral-8x7B") -> Plan:
    return estimate_request(model, "tp2,ep4", on="8xH100", options=options)[0]


def test_lora_has_no_gradients_of_frozen_weights(tmp_path: Path) -> None:
    """Weights stay; gradients and moments are of adapters alone."""
    sizes = {}
    for task in Task:
        plan = estimate(WorkloadOptions(task=task))
        sizes[task] = {
            component: sum(
                row.bytes for row in plan.estimate.ledgers[0].memory if row.component is component
            )
            for component in (Component.WEIGHTS, Component.GRADIENTS, Component.MOMENTS)
        }
    assert sizes[Task.PRETRAIN] == sizes[Task.SFT]
    assert sizes[Task.LORA][Component.WEIGHTS] == pytest.approx(
        sizes[Task.SFT][Component.WEIGHTS], rel=0.01
    )
    for component in (Component.GRADIENTS, Component.MOMENTS):
        assert 0 < sizes[Task.LORA][component] < 0.01 * sizes[Task.SFT][component]
    path = tmp_path / "plan.json"
    write_json(path, estimate(WorkloadOptions()))
    again = estimate(WorkloadOptions(lora_rank=8), path)
    assert again.workload.fine_tuning.task is Task.LORA
    assert again.workload.fine_tuning.lora_rank == 8


def test_a_rank_is_of_lora() -> None:
    assert (read_lora_rank("r=16"), read_lora_rank("8"), read_lora_rank("")) == (16, 8, None)
    options = WorkloadOptions(task=Task.SFT, lora_rank=8)
    with pytest.raises(mw.BadInput, match=r"--lora: .* --task is sft; .* --task lora"):
        change_training(Workload(seq_len=16, global_batch=1), options)


def test_a_histogram_of_samples_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,samples\n1000,30\n3000,10\n")
    whole = estimate(WorkloadOptions())
    packed, lines = estimate_request(
        "Mixtral-8x7B", "tp2,ep4", on="8xH100", options=WorkloadOptions(lengths=path)
    )
    assert any("40 samples of up to 3,000 tokens, packed into 15 sequences" in at for at in lines)
    assert packed.estimate.model_flops_per_step < whole.estimate.model_flops_per_step
    assert packed.estimate.step_s < whole.estimate.step_s
    short = WorkloadOptions(lengths=path, seq_len=2048)
    with pytest.raises(mw.BadInput, match=r"--seq-len=2048: .* 3,000 tokens; .* 4096"):
        estimate(short)
    again, lines = estimate_request(whole, "", on="", options=WorkloadOptions(lengths=path))
    assert again.workload == packed.workload
    assert again.estimate == packed.estimate
    assert len(lines) == 1
    with pytest.raises(mw.BadInput, match=r"--seq-len=0: must be in 1\.\."):
        estimate_request(whole, "", on="", options=WorkloadOptions(seq_len=0))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must begin with the header tokens,samples"),
        ("tokens,samples\n", "must have from 1 to 10,000,000 samples"),
        ("tokens,samples\n5\n", "lengths.csv:2=5: must be two whole numbers"),
        ("tokens,samples\n5,-1\n", "must be two whole numbers from 1"),
        ("tokens,samples\n5,999999999\n", "counts divided by a power of ten"),
    ],
)
def test_a_file_that_is_no_histogram_is_named(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(mw.BadInput, match=re.escape(rule)):
        estimate(WorkloadOptions(lengths=path))


@pytest.mark.parametrize(("batch", "end"), [(4_000_000, "--global-batch 977"), (15_360, "")])
def test_a_batch_that_is_meant_in_tokens_is_told_in_sequences(batch: int, end: str) -> None:
    options = WorkloadOptions(global_batch=batch)
    request = read_plan_request("DeepSeek-V3", "2048xH800", options)
    lines = [line for line in request.defaults if "counts sequences" in line]
    assert [line.endswith(end) for line in lines] == [True] * bool(end)


# Each as a user of the package writes it, and as a verb reads it.
STATED: dict[str, tuple[Any, Any]] = {
    "seq_len": (2048, 2048),
    "global_batch": (64, 64),
    "precision": ("fp8", "fp8"),
    "network": ("roce", "roce"),
    "rampup_batch_size": ((16, 16, 6400), (16, 16, 6400)),
    "task": ("lora", Task.LORA),
    "lora_rank": (8, 8),
    "quantize_base": ("nf4", BaseQuantization.NF4),
    "load": (1.5, Path("1.5")),
    "steps": (300, 300),
    "tokens": ("2B", 2_000_000_000),
}


@pytest.mark.parametrize("function", [mw.plan, mw.estimate, mw.show, mw.budget])
def test_functions_take_every_option_of_the_workload(function: Any) -> None:
    """As their verbs do: an option that only the command line had would be a second way."""
    hints = get_type_hints(function)
    (keys,) = get_args(hints["choices"])
    names = {*signature(function).parameters, *keys.__annotations__}
    told = {field.name for field in fields(WorkloadOptions)}
    if function in (mw.show, mw.budget):
        told -= {"steps", "tokens", "lengths"}  # NoOption there: no figure depends on them
    assert told <= names


@pytest.mark.parametrize("key", STATED)
def test_a_keyword_is_the_option_of_its_name(key: str) -> None:
    stated, read = STATED[key]
    lora = {"lora_rank": 8} if key == "quantize_base" else {}
    told = mw.estimate("Mixtral-8x7B", "tp2,ep4", on="8xH100", **{key: stated}, **lora)
    assert told == estimate(WorkloadOptions(**{key: read}, **lora))


def test_keywords_that_are_none_are_refused() -> None:
    with pytest.raises(mw.BadInput, match=r"task=lorra: must be one of .*value: lora"):
        mw.estimate("Mixtral-8x7B", "tp2,ep4", on="8xH100", task="lorra")
    with pytest.raises(TypeError, match=r"budget\(\) got an unexpected keyword argument 'stepps'"):
        mw.budget("Mixtral-8x7B", on="8xH100", tokens="1B", stepps=3)  # type: ignore[call-arg]
