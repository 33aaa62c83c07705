"""Training from a Hugging Face folder and back to one, in layouts that cut every tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_jobs
from hf_families import LING_SOURCES, write_fp8, write_ling, write_model
from moewright.cli.main import main
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.intake.hf import read_config
from moewright.intake.job import read_job
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DataSpec,
    FineTuningSpec,
    LossSpec,
    OptimizerSpec,
    RouterTraining,
    Task,
)
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def write_folder(family: str, folder: Path) -> Path:
    write_model(family, folder, vocab_size=tiny_jobs.VOCABULARY, shard_bytes=30_000)
    return folder


def make_plan(folder: Path, data: DataSpec, layout: str, world: int, *, lr: float) -> Plan:
    workload = replace(
        tiny_jobs.build_workload(data, steps=2, loss=LossSpec()),
        weights=str(folder),
        optimizer=OptimizerSpec(lr=lr, weight_decay=0.1, eps=1e-6),
        router=RouterTraining(bias_update_rate=0.0),
    )
    model = replace(read_config(folder), mtp_layers=0)  # transformers writes none of those layers
    return tiny_jobs.build_plan(workload, layout, world_size=world, model=model)


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.turns
@pytest.mark.parametrize(
    ("family", "layout", "world"),
    [
        ("qwen2_moe", "tp2,ep2,pp2,mbs2", 4),
        ("deepseek_v3", "tp2,ep2,pp2,mbs2", 4),
        ("gpt_oss", "ep2,etp2,tp2,mbs2", 4),
        ("llama", "tp2,pp2,mbs2", 4),
        ("qwen3_vl_moe", "ep2,mbs2", 2),  # what sees comes from the folder that it started from
        thorough("llama4", "tp2,mbs2", 2),
        thorough("qwen3_5_moe", "ep2,mbs2", 2),
    ],
)
def test_a_run_that_learns_nothing_returns_the_weights_that_it_read(
    family: str, layout: str, world: int, data: DataSpec, tmp_path: Path
) -> None:
    """With a learning rate of 0 every bit of every tensor comes through the cuts and back."""
    folder = write_folder(family, tmp_path / "hf")
    assert train(make_plan(folder, data, layout, world, lr=0.0), tmp_path / "run") is ExitCode.DONE
    assert main(("convert", "export", str(tmp_path / "run"), "--out", str(tmp_path / "back"))) == 0
    actual = load_tensors(tmp_path / "back")
    expected = load_tensors(folder)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_ranks_read_their_parts_of_fp8_blocks(data: DataSpec, tmp_path: Path) -> None:
    """No cut of the layout falls between FP8 blocks; the fp32 of the run is what they mean."""
    expected = write_fp8(write_folder("deepseek_v3", tmp_path / "hf"), tmp_path / "fp8", (10, 12))
    assert (
        train(make_plan(tmp_path / "fp8", data, "tp2,ep2,pp2,mbs2", 4, lr=0.0), tmp_path / "run")
        is ExitCode.DONE
    )
    assert main(("convert", "export", str(tmp_path / "run"), "--out", str(tmp_path / "back"))) == 0
    actual = load_tensors(tmp_path / "back")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.thorough
def test_adapters_of_ling_are_merged_into_its_joined_projections(
    data: DataSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As into those of the GLM-4.5 that computes the same, whose merged weights peft agrees with.

    Ling's queries, keys and values are one module, for which PEFT has no adapters of the parts.
    """
    shape = {**LING_SOURCES["glm4_moe"], "vocab_size": tiny_jobs.VOCABULARY}
    write_model("glm4_moe", tmp_path / "glm", **shape)
    write_ling(tmp_path / "glm", tmp_path / "ling")
    fine_tuning = FineTuningSpec(
        task=Task.LORA, lora_rank=8, lora_alpha=16.0, lora_experts=True, lora_router=True
    )
    for name in ("glm", "ling"):
        plan = make_plan(tmp_path / name, data, "tp2,ep2,mbs2", 2, lr=1e-2)
        workload = replace(plan.workload, fine_tuning=fine_tuning)
        run = tmp_path / f"{name}_run"
        assert train(replace(plan, workload=workload), run) is ExitCode.DONE
        assert main(("convert", "export", str(run), "--out", str(tmp_path / f"{name}_out"))) == 0
    write_ling(tmp_path / "glm_out", tmp_path / "expected")
    actual = load_tensors(tmp_path / "ling_out")
    expected = load_tensors(tmp_path / "expected")
    before = load_tensors(tmp_path / "ling")
    assert actual.keys() == expected.keys()
    joined = "model.layers.1.attention.query_key_value.weight"
    assert (actual[joined] - before[joined]).abs().amax(1).gt(0).all()  # rows of all three parts
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    arguments = ("convert", "export", str(tmp_path / "ling_run"), "--adapters", "--out")
    capsys.readouterr()
    assert main((*arguments, str(tmp_path / "peft"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "query_key_value.weight" in line
    assert "nearest legal value: the merged weights" in line
    assert not (tmp_path / "peft").exists()


ADAPTERS = FineTuningSpec(task=Task.LORA, lora_rank=8, lora_alpha=16.0)


def train_adapters(
    folder: Path, data: DataSpec, run: Path, fine_tuning: FineTuningSpec = ADAPTERS
) -> None:
    plan = make_plan(folder, data, "tp2,ep2,mbs2", 2, lr=1e-2)
    workload = replace(plan.workload, fine_tuning=fine_tuning)
    assert train(replace(plan, workload=workload), run) is ExitCode.DONE


@pytest.mark.turns
@pytest.mark.parametrize(
    ("family", "fine_tuning"),
    [
        # Rows of its projections lie part by part there, and key head by key head here.
        ("qwen3_5_moe_text", ADAPTERS),
        # Its experts and routers are parameters there, which have no modules of their own.
        ("deepseek_v4", replace(ADAPTERS, lora_rank=4, lora_experts=True, lora_router=True)),
    ],
)
def test_adapters_are_those_of_peft(
    family: str, fine_tuning: FineTuningSpec, data: DataSpec, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    folder = tmp_path / "hf"
    write_model(family, folder, vocab_size=tiny_jobs.VOCABULARY)
    train_adapters(folder, data, tmp_path / "run", fine_tuning)
    for name, more in (("merged", ()), ("adapter", ("--adapters",))):
        arguments = ("convert", "export", str(tmp_path / "run"), "--out", str(tmp_path / name))
        assert main((*arguments, *more)) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(1, 25).view(1, 24) % tiny_jobs.VOCABULARY
    with torch.no_grad():
        base = load(folder, dtype="float32")
        plain = base(ids).logits
        merged = load(tmp_path / "merged", dtype="float32")(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert float((merged - plain).norm() / plain.norm()) > 1e-3
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_adapters_of_mamba_are_merged_and_refused_to_peft(
    data: DataSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT takes none of its output projection, which its kernels multiply by themselves."""
    write_model("nemotron_h", tmp_path / "hf", vocab_size=tiny_jobs.VOCABULARY)
    train_adapters(tmp_path / "hf", data, tmp_path / "run")
    arguments = ("convert", "export", str(tmp_path / "run"), "--out")
    assert main((*arguments, str(tmp_path / "merged"))) == 0
    before = load_tensors(tmp_path / "hf")
    merged = load_tensors(tmp_path / "merged")
    projection = "backbone.layers.0.mixer.in_proj.weight"
    assert (merged[projection] - before[projection]).abs().amax(1).gt(0).all()
    capsys.readouterr()
    assert main((*arguments, str(tmp_path / "peft"), "--adapters")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "mixer.out_proj.weight: is multiplied inside of Mamba's kernels" in line
    assert not (tmp_path / "peft").exists()


@pytest.mark.thorough
def test_a_model_trained_in_parts_equals_one_trained_whole(data: DataSpec, tmp_path: Path) -> None:
    """Transformers loads the exports of all runs and sees the same model.

    A run starts from an imported checkpoint as it starts from the folder.
    """
    folder = write_folder("qwen3_moe", tmp_path / "hf")
    assert main(("convert", "import", str(folder), "--out", str(tmp_path / "ours"))) == 0
    ids = torch.randint(
        0, tiny_jobs.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5)
    )
    logits = []
    for name, start, layout, world in (
        ("whole", folder, "mbs2", 1),
        ("parts", folder, "tp2,ep2,pp2,mbs2", 4),
        ("again", tmp_path / "ours", "ep2,mbs2", 2),
    ):
        plan = make_plan(folder, data, layout, world, lr=1e-3)
        plan = replace(plan, workload=replace(plan.workload, weights=str(start)))
        assert train(plan, tmp_path / name) is ExitCode.DONE
        out = tmp_path / f"{name}-hf"
        assert main(("convert", "export", str(tmp_path / name), "--out", str(out))) == 0
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not any(
            loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        logits.append(model(ids).logits.detach())
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        ids
    ).logits
    assert float((logits[0] - before).detach().norm() / before.norm()) > 1e-3
    for run_logits in logits[1:]:  # AdamW, as in the proofs of layouts
        assert float((run_logits - logits[0]).norm() / logits[0].norm()) < 1e-4


def test_weights_of_another_model_are_refused_by_name(data: DataSpec, tmp_path: Path) -> None:
    folder = write_folder("qwen3", tmp_path / "hf")
    plan = make_plan(folder, data, "mbs2", 1, lr=1e-3)
    wider = replace(plan, model=replace(plan.model, dense_ffn_size=64))
    with pytest.raises(
        BadInput, match=r"mlp.down_proj.weight: has shape \[32, 48\], config.json says \[32, 64"
    ):
        train(wider, tmp_path / "run")
    file = next(folder.glob("*.safetensors"))
    stored = load_file(file)
    name, _ = stored.popitem()
    save_file(stored, file)
    with pytest.raises(BadInput, match=f"{name}: is missing"):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_job_with_weights_needs_no_config(tmp_path: Path) -> None:
    folder = write_folder("qwen3", tmp_path / "hf")
    job_file = tmp_path / "job.toml"
    job_file.write_text('[model]\nweights = "hf"\n[train]\nseq_len = 8\nglobal_batch = 2\n')
    request = read_job(job_file)
    assert request.workload.weights == str(folder)
    assert request.model == read_config(folder)
    (tmp_path / "other.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text())})
    )
    job_file.write_text(
        '[model]\nconfig = "other.json"\nweights = "hf"\n[train]\nseq_len = 8\nglobal_batch = 2\n'
    )
    assert read_job(job_file).model.hidden_size == request.model.hidden_size
