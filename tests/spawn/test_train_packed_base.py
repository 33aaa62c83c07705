"""Training adapters beside a base in NF4: in any layout as in one process, and what it holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_adapters import assert_trained_alike, train_whole_and_cut

import tiny_jobs
from hf_families import write_model
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import LineStatus, Section, compare_ledgers
from moewright.engine.kernels.packed_base import pack_nf4
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.intake.hf import read_config
from moewright.spec.errors import BadInput
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.plan import Plan
from moewright.spec.workload import BaseQuantization, DataSpec, Dtype, FineTuningSpec, Task
from selection import thorough
from tiny_jobs import read_steps

pytestmark = pytest.mark.spawn
STEPS = 2
TUNING = FineTuningSpec(
    task=Task.LORA,
    lora_rank=8,
    lora_alpha=16.0,
    lora_experts=True,
    quantize_base=BaseQuantization.NF4,
)


FP8 = replace(TUNING, quantize_base=BaseQuantization.FP8)
# Wide enough that two ranks cut no block of NF4, and that a matrix has two groups of them.
MODEL = replace(
    tiny_jobs.MODEL,
    hidden_size=128,
    attention=replace(tiny_jobs.MODEL.attention, head_dim=32, v_head_dim=32),
    dense_ffn_size=256,
    initializer_range=0.1,
)


def build_plan(
    data: DataSpec,
    layout: str,
    world_size: int,
    dtype: Dtype = Dtype.FP32,
    tuning: FineTuningSpec = TUNING,
) -> Plan:
    workload = tiny_jobs.build_workload(data, steps=STEPS, fine_tuning=tuning, precision=dtype)
    workload = replace(workload, optimizer=replace(workload.optimizer, eps=1e-4))
    return tiny_jobs.build_plan(workload, layout, world_size=world_size, model=MODEL)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "layout", "tuning"),
    [
        (2, "tp2,ep2", TUNING),
        thorough(4, "tp2,ep2,recompute=full", TUNING),
        thorough(2, "pp2,schedule=zb-h1,layout='Et|ttL'", TUNING),
        thorough(2, "ep2,zero0,recompute=moe+mlp", TUNING),
        thorough(2, "cp2,ep2,overlap=grad+param", TUNING),
        thorough(2, "ep2,cp2", FP8),
    ],
)
def test_a_packed_base_trains_as_in_one_process(
    world_size: int, layout: str, tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    """The parts that a layout cuts stand for the very numbers of the whole."""
    whole = build_plan(data, "", 1, tuning=tuning)
    cut = build_plan(data, layout, world_size, tuning=tuning)
    assert_trained_alike(*train_whole_and_cut(whole, cut, tmp_path), tmp_path)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "tuning"),
    [
        (2, "tp2,ep2,mbs2", TUNING),
        thorough(2, "pp2,recompute=moe_act,layout='Et|ttL'", TUNING),
        thorough(2, "ep2,zero0,recompute=full", TUNING),
        thorough(2, "ep2", FP8),
    ],
)
def test_the_ledger_of_a_packed_base_is_the_one_that_is_counted(
    world_size: int, layout: str, tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    plan = build_plan(data, layout, world_size, Dtype.BF16, tuning)
    assert train(plan, tmp_path) is ExitCode.DONE
    selection = read_json(Selection, tmp_path / "ledger" / "selection.json")
    for rank in range(world_size):
        counted = read_json(Ledger, tmp_path / "ledger" / f"rank{rank:05d}.json")
        predicted = predict_ledger(plan, rank=rank, selection=selection)
        comparison = compare_ledgers(predicted, counted)
        wrong = [
            line
            for line in comparison.lines
            if line.section not in (Section.TIME, Section.STORAGES)
            and line.status is not LineStatus.EQUAL
        ]
        assert not wrong


def test_a_layout_that_cuts_blocks_is_refused_by_name(data: DataSpec, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cuts .* inside of the blocks of nf4") as caught:
        train(build_plan(data, "tp4,ep4", 4), tmp_path)
    assert caught.value.reasons[0].field == "layout.tp"


def test_a_packed_base_is_the_folder_of_the_numbers_that_it_stands_for(
    data: DataSpec, tmp_path: Path
) -> None:
    """Every linear is packed and nothing else: losses are those of LoRA beside what it means."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "vocab_size": tiny_jobs.VOCABULARY}
    write_model("qwen3_moe", tmp_path / "hf", dtype=torch.bfloat16, **sizes)
    shutil.copytree(tmp_path / "hf", tmp_path / "unpacked")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in stored.items():
        if "_proj." in name:
            shape = tuple(tensor.shape)
            stored[name] = pack_nf4(
                tensor, tensor.dtype, tensor.device, shape, (0, 0), lambda part, _: part
            ).unpack()
    save_file(stored, tmp_path / "unpacked" / "model.safetensors", {"format": "pt"})
    plan = build_plan(data, "", 1, Dtype.BF16)
    losses = []
    for name, quantization in (("hf", TUNING.quantize_base), ("unpacked", BaseQuantization.NONE)):
        folder = tmp_path / name
        workload = replace(
            plan.workload,
            weights=str(folder),
            fine_tuning=replace(TUNING, quantize_base=quantization),
        )
        own = replace(plan, model=read_config(folder), workload=workload)
        assert train(own, tmp_path / f"run-{name}") is ExitCode.DONE
        losses.append([step["loss"] for step in read_steps(tmp_path / f"run-{name}")])
    assert losses[0] == losses[1]


def test_a_packed_base_is_of_adapters_alone(data: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(data, "", 1)
    whole = FineTuningSpec(task=Task.SFT, quantize_base=BaseQuantization.NF4)
    plan = replace(plan, workload=replace(plan.workload, fine_tuning=whole))
    with pytest.raises(BadInput, match="applies to the frozen weights under adapters: task=lora"):
        train(plan, tmp_path)
