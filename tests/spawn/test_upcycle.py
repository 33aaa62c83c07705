"""Upcycling: the model of experts computes what the dense one did, in every layout, and learns on
from there."""

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
    """A run of a dense model, trained for a few steps on two ranks."""
    run_dir = tmp_path_factory.mktemp("dense")
    plan = tiny_jobs.build_plan(
        tiny_jobs.build_workload(data, steps=STEPS), "tp2,mbs2", world_size=2, model=DENSE
    )
    assert train(plan, run_dir) is ExitCode.DONE
    return run_dir


@pytest.fixture(scope="module")
def upcycled(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(options: str) -> Path:
        if options not in made:
            made[options] = tmp_path_factory.mktemp("upcycled") / "moe"
            assert main(["upcycle", str(dense), "--out", str(made[options]), *options.split()]) == 0
        return made[options]

    return of


def logits(model: ModelSpec, weights: Path, folder: Path) -> torch.Tensor:
    """Of one process, for random tokens."""

    def rank(seat: RankContext) -> RankOutcome:
        plan = tiny_jobs.build_plan(PROBE, "mbs4", world_size=1, model=model)
        fixed = draw_batches(model)
        job = build_train_state(
            Job(model=model, workload=plan.workload, layout=plan.layout),
            fixed,
            rank=0,
            device=init_distributed(seat),
            initial_value=draw_initial_value,
        )
        load_checkpoint(find_checkpoint(weights), shards=job.weight_shards(), comm=single_process())
        job.optimizer.all_gather_params()
        torch.save(
            torch.cat(
                [p.tensor.flatten(0, 1) for p in _compute_outputs(job, fixed) if p.name == "logits"]
            ),
            folder / "l",
        )
        return RankOutcome.DONE

    folder.mkdir()
    assert launch(rank, nproc=1, run_dir=folder / "run") is ExitCode.DONE
    return torch.load(folder / "l")


PROBE = replace(tiny_jobs.build_workload(DataSpec()), seq_len=16)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_function_is_kept_exactly(
    choice: str, dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """max |moe(x) - dense(x)| is rounding: sums in another order, in fp32."""
    out = upcycled(CHOICES[choice])
    wanted = logits(DENSE, dense, tmp_path / "dense")
    found = logits(read_config(out), out, tmp_path / "moe")
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    print(f"{choice}: max |moe(x) - dense(x)| / max |dense(x)| = {worst:.1e}")
    assert worst <= 3e-6


def test_the_published_factors_keep_it_about(
    dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """SwiGLU is not homogeneous: the cube root on its gate changes the function, less so than no
    factor at all."""
    out = upcycled(CHOICES["granular"] + " --scaling published")
    wanted = logits(DENSE, dense, tmp_path / "dense")
    found = logits(read_config(out), out, tmp_path / "moe")
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    print(f"published factors: {worst:.1e}")
    assert 1e-4 < worst < 1.0


def go_on(
    data: DataSpec,
    model: ModelSpec,
    weights: Path | None,
    layout: str,
    world_size: int,
    run_dir: Path,
) -> list[float]:
    """Losses of a few steps from given weights."""
    work = tiny_jobs.build_workload(data, steps=STEPS, weights=str(weights or ""))
    assert (
        train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_training_goes_on_without_a_jump_in_any_layout(
    data: DataSpec, dense: Path, upcycled: Callable[[str], Path], tmp_path: Path
) -> None:
    """The first loss is that of the dense model going on from the same weights; from there it only
    falls."""
    out = upcycled(CHOICES["granular"])
    model = read_config(out)
    wanted = go_on(data, DENSE, dense, "mbs2", 1, tmp_path / "dense")
    fresh = go_on(data, DENSE, None, "mbs2", 1, tmp_path / "fresh")
    assert wanted[0] < fresh[0] - 0.1  # the weights are those that were trained
    for number, (world_size, layout) in enumerate(
        [(1, "mbs2"), (4, "tp2,ep4,mbs2"), (4, "pp2,ep2,zero0,mbs2,layout='Et*2|tL'")]
    ):
        found = go_on(data, model, out, layout, world_size, tmp_path / str(number))
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        print(
            layout, [round(loss, 4) for loss in found], "dense", [round(loss, 4) for loss in wanted]
        )
        assert max(found) == found[0]  # no jump
        assert found[-1] < found[0] - 0.5 * (wanted[0] - wanted[-1])


def test_a_hugging_face_folder_upcycles_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=101, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    source, out = tmp_path / "hf", tmp_path / "moe"
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(source)
    assert main(["upcycle", str(source), "--out", str(out), "--experts", "4", "--top-k", "2"]) == 0
    assert read_json_data(out / "config.json")["model_type"] == "mixtral"
    model = read_config(out)
    ids = draw_batches(model).inputs[0]
    with torch.no_grad():
        wanted = theirs(ids).logits.flatten(0, 1)
    found = logits(model, out, tmp_path / "probe")
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("options", "said"),
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
    options: str, said: str, dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["upcycle", str(dense), "--out", str(tmp_path / "o"), *options.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "o").exists()


def test_bad_folders_end_in_one_line(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    for source, out, said in (
        (tmp_path / "nowhere", tmp_path / "o", "no such folder"),
        (tmp_path / "full", tmp_path / "o", "holds no checkpoint of moewright"),
        (dense, tmp_path / "full", "--out"),
    ):
        assert (
            main(["upcycle", str(source), "--out", str(out), "--experts", "4", "--top-k", "2"]) == 2
        )
        (line,) = capfd.readouterr().err.splitlines()
        assert said in line
    assert not (tmp_path / "o").exists()


def test_weights_of_another_model_are_refused(data: DataSpec, dense: Path, tmp_path: Path) -> None:
    work = tiny_jobs.build_workload(data, weights=str(dense))
    wider = replace(DENSE, dense_ffn_size=64)
    job: Plan = tiny_jobs.build_plan(work, "mbs2", world_size=1, model=wider)
    with pytest.raises(
        BadInput,
        match=r"model.weights: model.dense_ffn_size is 48 in the checkpoint and 64 in the job",
    ):
        train(job, tmp_path / "run")
    assert not (tmp_path / "run").exists()
