"""Training from a Hugging Face folder and back to one, in layouts that cut every tensor another
way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_jobs
from hf_families import write_fp8, write_model
from moewright.cli.main import main
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.intake.hf import read_config
from moewright.intake.job import read_job
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, LossSpec, OptimizerSpec, RouterTraining

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def write(family: str, folder: Path) -> Path:
    write_model(family, folder, vocab_size=tiny_jobs.VOCABULARY, shard_bytes=30_000)
    return folder


def plan_from(folder: Path, data: DataSpec, layout: str, world: int, *, lr: float) -> Plan:
    work = replace(
        tiny_jobs.build_workload(data, steps=2, loss=LossSpec()),
        weights=str(folder),
        optimizer=OptimizerSpec(lr=lr, weight_decay=0.1, eps=1e-6),
        router=RouterTraining(bias_update_rate=0.0),
    )
    model = replace(read_config(folder), mtp_layers=0)  # transformers writes none of those layers
    return tiny_jobs.build_plan(work, layout, world_size=world, model=model)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("family", "layout", "world"),
    [
        ("qwen2_moe", "tp2,ep2,pp2,mbs2", 4),
        ("deepseek_v3", "tp2,ep2,pp2,mbs2", 4),
        ("gpt_oss", "ep2,etp2,tp2,mbs2", 4),
        ("llama", "tp2,pp2,mbs2", 4),
    ],
)
def test_a_run_that_learns_nothing_gives_back_what_it_was_given(
    family: str, layout: str, world: int, data: DataSpec, tmp_path: Path
) -> None:
    """With a learning rate of 0 every bit of every tensor comes through the layout's cuts and
    back."""
    folder = write(family, tmp_path / "hf")
    assert train(plan_from(folder, data, layout, world, lr=0.0), tmp_path / "run") is ExitCode.DONE
    assert main(("convert", "export", str(tmp_path / "run"), "--out", str(tmp_path / "back"))) == 0
    found, wanted = tensors(tmp_path / "back"), tensors(folder)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_ranks_read_their_parts_of_blocks_that_share_a_factor(
    data: DataSpec, tmp_path: Path
) -> None:
    """FP8, in blocks that no cut of the layout falls between; the run's fp32 is what the blocks
    stand for."""
    wanted = write_fp8(write("deepseek_v3", tmp_path / "hf"), tmp_path / "fp8", (10, 12))
    assert (
        train(plan_from(tmp_path / "fp8", data, "tp2,ep2,pp2,mbs2", 4, lr=0.0), tmp_path / "run")
        is ExitCode.DONE
    )
    assert main(("convert", "export", str(tmp_path / "run"), "--out", str(tmp_path / "back"))) == 0
    found = tensors(tmp_path / "back")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_what_was_trained_in_parts_is_what_was_trained_whole(
    data: DataSpec, tmp_path: Path
) -> None:
    """Transformers loads both, and sees the same model; of an imported checkpoint the run starts as
    of the folder."""
    folder = write("qwen3_moe", tmp_path / "hf")
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
        job = plan_from(folder, data, layout, world, lr=1e-3)
        job = replace(job, workload=replace(job.workload, weights=str(start)))
        assert train(job, tmp_path / name) is ExitCode.DONE
        out = tmp_path / f"{name}-hf"
        assert main(("convert", "export", str(tmp_path / name), "--out", str(out))) == 0
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        logits.append(model(ids).logits.detach())
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        ids
    ).logits
    assert float((logits[0] - before).detach().norm() / before.norm()) > 1e-3
    for other in logits[1:]:  # AdamW, as in the proofs of layouts
        assert float((other - logits[0]).norm() / logits[0].norm()) < 1e-4


def test_weights_of_another_model_are_refused_by_name(data: DataSpec, tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "hf")
    job = plan_from(folder, data, "mbs2", 1, lr=1e-3)
    wider = replace(job, model=replace(job.model, dense_ffn_size=64))
    with pytest.raises(
        BadInput, match=r"mlp.down_proj.weight: has shape \[32, 48\], config.json says \[32, 64"
    ):
        train(wider, tmp_path / "run")
    file = next(folder.glob("*.safetensors"))
    stored = load_file(file)
    name, _ = stored.popitem()
    save_file(stored, file)
    with pytest.raises(BadInput, match=f"{name}: is missing"):
        train(job, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_job_needs_no_other_config(tmp_path: Path) -> None:
    folder = write("qwen3", tmp_path / "hf")
    job = tmp_path / "job.toml"
    job.write_text('[model]\nweights = "hf"\n[train]\nseq_len = 8\nglobal_batch = 2\n')
    read = read_job(job)
    assert read.workload.weights == str(folder)
    assert read.model == read_config(folder)
    (tmp_path / "other.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text())})
    )
    job.write_text(
        '[model]\nconfig = "other.json"\nweights = "hf"\n[train]\nseq_len = 8\nglobal_batch = 2\n'
    )
    assert read_job(job).model.hidden_size == read.model.hidden_size
