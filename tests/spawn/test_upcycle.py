"""Upcycling: the model with experts computes what the dense one did, in every layout.

It goes on learning from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from layout_proof import draw_batches
from moewright.cli.main import main
from moewright.codec import read_json_data
from moewright.engine.checkpoint import find_checkpoint, load_checkpoint, single_process
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.train import train
from moewright.engine.run.verify import _compute_outputs
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.intake.hf import read_config
from moewright.rules.job import Job
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec

pytestmark = pytest.mark.spawn

DENSE = replace(tiny_jobs.DENSE, max_position=64)
STEPS = 4
CHOICES = {
    "copies": "--experts 4 --top-k 2",
    "granular": "--experts 12 --top-k 4 --granularity 4",
    "granular, not a power of two": "--experts 9 --top-k 6 --granularity 3 --dense-first 1",
    "every second layer": "--experts 4 --top-k 1 --every 2",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dense(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a dense model for a few steps on two ranks."""
    run_dir = tmp_path_factory.mktemp("dense")
    plan = tiny_jobs.build_plan(
        tiny_jobs.build_workload(data, steps=STEPS), "tp2,mbs2", world_size=2, model=DENSE
    )
    assert train(plan, run_dir) is ExitCode.DONE
    return run_dir


@pytest.fixture(scope="module")
def upcycled(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    runs: dict[str, Path] = {}

    def upcycle(options: str) -> Path:
        if options not in runs:
            runs[options] = tmp_path_factory.mktemp("upcycled") / "moe"
            assert main(["upcycle", str(dense), "--out", str(runs[options]), *options.split()]) == 0
        return runs[options]

    return upcycle


def compute_logits(model: ModelSpec, weights: Path, folder: Path) -> torch.Tensor:
    """Compute the logits of one process for random tokens."""

    def run_rank(context: RankContext) -> RankOutcome:
        plan = tiny_jobs.build_plan(PROBE_WORKLOAD, "mbs4", world_size=1, model=model)
        batches = draw_batches(model)
        state = build_train_state(
            Job(model=model, workload=plan.workload, layout=plan.layout),
            batches,
            rank=0,
            device=init_distributed(context),
            initial_value=draw_initial_value,
        )
        load_checkpoint(
            find_checkpoint(weights), shards=state.weight_shards(), comm=single_process()
        )
        state.optimizer.all_gather_params()
        outputs = _compute_outputs(state, batches)
        parts = [shard.tensor.flatten(0, 1) for shard in outputs if shard.name == "logits"]
        torch.save(torch.cat(parts), folder / "logits")
        return RankOutcome.DONE

    folder.mkdir()
    assert launch(run_rank, nproc=1, run_dir=folder / "run") is ExitCode.DONE
    return torch.load(folder / "logits")


PROBE_WORKLOAD = replace(tiny_jobs.build_workload(DataSpec()), seq_len=16)


@pytest.mark.turns
@pytest.mark.parametrize("choice", CHOICES)
def test_upcycling_keeps_the_function_exactly(
    choice: str, dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """The difference max |moe(x) - dense(x)| is rounding: sums in another order, in fp32."""
    out = upcycled(CHOICES[choice])
    expected = compute_logits(DENSE, dense, tmp_path / "dense")
    actual = compute_logits(read_config(out), out, tmp_path / "moe")
    worst = float((actual - expected).abs().max() / expected.abs().max())
    print(f"{choice}: max |moe(x) - dense(x)| / max |dense(x)| = {worst:.1e}")
    assert worst <= 3e-6


def test_the_published_factors_keep_the_function_approximately(
    dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """SwiGLU is not homogeneous.

    The cube root on its gate changes the function, but less so than no factor at all.
    """
    out = upcycled(CHOICES["granular"] + " --scaling published")
    expected = compute_logits(DENSE, dense, tmp_path / "dense")
    actual = compute_logits(read_config(out), out, tmp_path / "moe")
    worst = float((actual - expected).abs().max() / expected.abs().max())
    print(f"published factors: {worst:.1e}")
    assert 1e-4 < worst < 1.0


def continue_training(
    data: DataSpec,
    model: ModelSpec,
    weights: Path | None,
    layout: str,
    world_size: int,
    run_dir: Path,
) -> list[float]:
    """Return the losses of a few steps from given weights."""
    workload = tiny_jobs.build_workload(data, steps=STEPS, weights=str(weights or ""))
    assert (
        train(tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.thorough
def test_training_goes_on_without_a_jump_in_any_layout(
    data: DataSpec, dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """The first loss is that of the dense model going on from the same weights.

    From there it only falls.
    """
    out = upcycled(CHOICES["granular"])
    model = read_config(out)
    dense_losses = continue_training(data, DENSE, dense, "mbs2", 1, tmp_path / "dense")
    fresh_losses = continue_training(data, DENSE, None, "mbs2", 1, tmp_path / "fresh")
    assert dense_losses[0] < fresh_losses[0] - 0.1  # the weights are those that were trained
    for number, (world_size, layout) in enumerate(
        [(1, "mbs2"), (4, "tp2,ep4,mbs2"), (4, "pp2,ep2,zero0,mbs2,layout='Et*2|tL'")]
    ):
        moe_losses = continue_training(data, model, out, layout, world_size, tmp_path / str(number))
        assert moe_losses[0] == pytest.approx(dense_losses[0], rel=1e-5)
        print(
            layout,
            [round(loss, 4) for loss in moe_losses],
            "dense",
            [round(loss, 4) for loss in dense_losses],
        )
        assert max(moe_losses) == moe_losses[0]  # no jump
        assert moe_losses[-1] < moe_losses[0] - 0.5 * (dense_losses[0] - dense_losses[-1])


def test_a_hugging_face_folder_upcycles_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=101,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    source = tmp_path / "hf"
    out = tmp_path / "moe"
    dense_model = transformers.LlamaForCausalLM(config)
    dense_model.save_pretrained(source)
    assert main(["upcycle", str(source), "--out", str(out), "--experts", "4", "--top-k", "2"]) == 0
    assert read_json_data(out / "config.json")["model_type"] == "mixtral"
    model = read_config(out)
    ids = draw_batches(model).inputs[0]
    with torch.no_grad():
        expected = dense_model(ids).logits.flatten(0, 1)
    actual = compute_logits(model, out, tmp_path / "probe")
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--experts 4 --top-k 5", "moewright: --top-k=5: must be at most experts 4"),
        (
            "--experts 4 --top-k 2 --dense-first 9",
            "moewright: --dense-first=9: leaves none of the 3 layers",
        ),
        ("--experts 4 --top-k 2 --scaling half", "half"),
    ],
)
def test_bad_options_end_in_one_line(
    options: str, message: str, dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["upcycle", str(dense), "--out", str(tmp_path / "o"), *options.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "o").exists()


def test_bad_folders_end_in_one_line(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    for source, out, message in (
        (tmp_path / "nowhere", tmp_path / "o", "no such folder"),
        (tmp_path / "full", tmp_path / "o", "holds no checkpoint of moewright"),
        (dense, tmp_path / "full", "--out"),
    ):
        assert (
            main(["upcycle", str(source), "--out", str(out), "--experts", "4", "--top-k", "2"]) == 2
        )
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "o").exists()


def test_weights_of_another_model_are_refused(data: DataSpec, dense: Path, tmp_path: Path) -> None:
    workload = tiny_jobs.build_workload(data, weights=str(dense))
    wider = replace(DENSE, dense_ffn_size=64)
    plan: Plan = tiny_jobs.build_plan(workload, "mbs2", world_size=1, model=wider)
    with pytest.raises(
        BadInput,
        match=r"model.weights: model.dense_ffn_size is 48 in the checkpoint and 64 in the job",
    ):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()
