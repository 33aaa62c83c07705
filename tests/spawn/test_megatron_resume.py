"""A run goes to Megatron-LM's format with the state of its optimizer, comes back, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import tiny_jobs
from hf_families import write_model
from moewright.cli.main import main
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.engine.torch_dist.import_weights import find_counts, read_common
from moewright.engine.torch_dist.metadata import TorchDistReader
from moewright.engine.torch_dist.optimizer_state import find_states
from moewright.intake.job import read_job
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from tiny_jobs import read_state, read_steps

JOB = """
[model]
config = "model"
[data]
train = "{train}"
[layout]
ep = 2
[train]
nproc = 2
seq_len = 32
global_batch = 4
steps = 4
precision = "fp32"
lr = 1e-2
warmup_steps = 1
eps = 1e-6
[checkpoint]
every_steps = 2
keep = 2
"""
PEER = Path(__file__).parents[1] / "megatron_core_peer.py"
STEP = "step-00000002"


def write_job(folder: Path, *, family: str = "deepseek_v3") -> Path:
    """Write the job of a tiny model with an MTP depth.

    That of DeepSeek-V3 has a dense layer and one with experts.
    """
    write_model(family, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "vocab_size": tiny_jobs.VOCABULARY}
    if family == "glm4_moe":
        config["first_k_dense_replace"] = 0
    (folder / "model" / "config.json").write_text(json.dumps(config))
    data = tiny_jobs.write_corpus(folder / "corpus")
    job = folder / "job.toml"
    job.write_text(JOB.format(train=data.train))
    return job


def plan_job(job: Path, layout: str, world_size: int) -> Plan:
    file = read_job(job)
    return tiny_jobs.build_plan(file.workload, layout, world_size=world_size, model=file.model)


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job that two ranks trained for four steps, in `run`."""
    folder = tmp_path_factory.mktemp("megatron_resume")
    plan = plan_job(write_job(folder), "ep2", 2)
    assert train(plan, folder / "run") is ExitCode.DONE
    return folder


@pytest.mark.spawn
def test_a_run_that_went_to_megatron_and_back_goes_on_to_the_same_losses(
    run: Path, tmp_path: Path
) -> None:
    checkpoint = run / "run" / "checkpoints" / STEP
    to = ("--to", "megatron", "--optimizer", "split", "--dtype", "bf16")
    assert convert("export", checkpoint, *to, "--out", tmp_path / "mg") == 0
    assert (
        convert("import", tmp_path / "mg", "--job", run / "job.toml", "--out", tmp_path / "r") == 0
    )
    expected, actual = read_state(run / "run", 2), read_state(tmp_path / "r", 2)
    assert expected.keys() == actual.keys()
    assert any(name.startswith("optim/exp_avg_sq/mtp.0.layer.moe.experts") for name in actual)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
    assert train(plan_job(run / "job.toml", "ep2", 2), tmp_path / "r") is ExitCode.DONE
    again = [step["loss"] for step in read_steps(tmp_path / "r")]
    assert again == [step["loss"] for step in read_steps(run / "run")][2:]


@pytest.mark.spawn
def test_what_goes_with_the_tensors_is_what_megatron_reads(run: Path, tmp_path: Path) -> None:
    to = ("--to", "megatron", "--optimizer", "joint", "--out", tmp_path / "mg")
    assert convert("export", run / "run", *to) == 0
    folder = tmp_path / "mg" / "iter_0000004"
    tensors = TorchDistReader(folder).tensors
    weights = {name for name in tensors if not name.startswith("optimizer.")}
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in weights
    trained = {name for name in weights if not name.endswith("expert_bias")}
    for state in ("param", "exp_avg", "exp_avg_sq"):
        for name in trained:
            stored = tensors[f"optimizer.state.{state}.{name}"]
            assert stored.shape == tensors[name].shape
            assert stored.dtype is torch.float32
    common = torch.load(folder / "common.pt", weights_only=True)
    assert common["opt_param_scheduler"]["num_steps"] == 16
    assert common["opt_param_scheduler"]["lr_warmup_steps"] == 4
    assert [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]] == [4, 4]
    assert set(find_counts(read_common(folder), "step")) == {4}


@pytest.mark.thorough
@pytest.mark.spawn
def test_states_of_other_optimizers_of_megatron_are_read(run: Path, tmp_path: Path) -> None:
    """Prefixes of chained optimizers, main weights of half precision, experts by themselves."""
    to = ("--to", "megatron", "--optimizer", "joint", "--dtype", "fp32", "--out", tmp_path / "mg")
    assert convert("export", run / "run" / "checkpoints" / STEP, *to) == 0
    reader = TorchDistReader(tmp_path / "mg" / "iter_0000002")
    state = {}
    for name, stored in reader.tensors.items():
        whole = reader.read_box(name, (0,) * len(stored.shape), stored.shape)
        name = name.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
        is_state = name.startswith("optimizer.")
        if ".experts.experts." not in name:
            state[f"chained_0.{name}" if is_state else name] = whole
            continue
        for expert, part in enumerate(whole):
            own = name.replace("experts.experts.", f"experts.experts.{expert}.")
            halves = {own: part}
            if "linear_fc1" in own:
                halves = dict(zip((f"{own}_w", f"{own}_v"), part.chunk(2), strict=True))
            state |= {f"chained_1.{key}" if is_state else key: v for key, v in halves.items()}
    folder = tmp_path / "other" / "iter_0000002"
    folder.mkdir(parents=True)
    save(state, checkpoint_id=str(folder), no_dist=True)
    groups = {"optimizer": {"param_groups": [{"step": 2, "lr": 0.1}]}}
    torch.save(
        {"iteration": 2, "args": tiny_jobs.MODEL, "optimizer": [groups, groups]},
        folder / "common.pt",
    )
    assert convert("import", folder, "--job", run / "job.toml", "--out", tmp_path / "r") == 0
    expected, actual = read_state(run / "run", 2), read_state(tmp_path / "r", 2)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.spawn
def test_state_that_is_not_there_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ("--to", "megatron", "--out", tmp_path / "mg")
    assert convert("export", run / "run", *to) == 0
    words = ("import", tmp_path / "mg", "--job", run / "job.toml", "--out", tmp_path / "r")
    assert convert(*words) == 2
    assert "holds no state of the optimizer" in capsys.readouterr().err
    assert (
        convert("import", tmp_path / "mg", "--config", run / "model", "--out", tmp_path / "w") == 0
    )
    to = ("--to", "megatron", "--optimizer", "split", "--out", tmp_path / "mg2")
    assert convert("export", tmp_path / "w", *to) == 2
    assert "is not of a run" in capsys.readouterr().err
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"
    with pytest.raises(BadInput, match=r"in buckets of the layout .*fully-reshardable"):
        find_states(tmp_path, [bucket])


@pytest.mark.thorough
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("kind", "degrees", "singleton"),
    [
        ("fully_reshardable", (1, 1, 1), 0),
        ("fully_reshardable", (2, 1, 2), 0),
        ("fully_reshardable", (2, 1, 2), 1),
        ("fully_reshardable", (1, 2, 1), 0),
        ("plain", (2, 1, 2), 0),
    ],
)
def test_megatron_core_reads_and_writes_the_state_of_the_optimizer(
    kind: str, degrees: tuple[int, int, int], singleton: int, tmp_path: Path
) -> None:
    """The distributed optimizer loads what we write and saves it; the plain one saves its own."""
    pytest.importorskip("megatron.core", reason="pip install megatron-core")
    job = write_job(tmp_path, family="glm4_moe")
    assert train(plan_job(job, "ep2", 2), tmp_path / "run") is ExitCode.DONE
    tp, pp, ep = degrees
    optimizer = "split" if ep > 1 else "joint"
    to = ("--to", "megatron", "--optimizer", optimizer, "--dtype", "fp32")
    checkpoint = tmp_path / "run" / "checkpoints" / STEP
    assert convert("export", checkpoint, *to, "--out", tmp_path / "mg") == 0
    nproc = max(tp, ep) * pp
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", str(PEER), str(tmp_path / "model")]
    command += [str(tmp_path / "mg" / "iter_0000002"), str(tmp_path / "iter_0000002")]
    log = tmp_path / "peer.log"
    with log.open("wb") as stream:
        done = subprocess.run(
            [*command, *map(str, (tp, pp, ep, singleton)), kind],
            stdout=stream,
            stderr=stream,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    words = ("--job", job, "--out", tmp_path / "r")
    assert convert("import", tmp_path / "iter_0000002", *words) == 0
    expected, actual = read_state(tmp_path / "run", 2), read_state(tmp_path / "r", 2)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        if kind == "plain" and name.endswith("selection_bias"):
            continue  # the peer rounds it, as it does all that it holds
        if kind == "plain" and name != "optim/updates":
            weight = expected[name.rpartition("/")[2]].bfloat16().float()
            moments = {"optim/exp_avg": 0.5 * weight, "optim/exp_avg_sq": weight * weight}
            tensor = moments.get(name.rpartition("/")[0], weight)
        assert torch.equal(actual[name], tensor), name


class Executed:
    """A record whose unpickling would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.path), "w"))


def test_nothing_of_what_goes_with_tensors_is_executed(tmp_path: Path) -> None:
    torch.save({"args": Executed(tmp_path / "made"), "iteration": 5}, tmp_path / "common.pt")
    assert read_common(tmp_path)["iteration"] == 5
    assert not (tmp_path / "made").exists()
    content = (tmp_path / "common.pt").read_bytes()
    for cut in range(0, len(content), 97):
        (tmp_path / "common.pt").write_bytes(content[:cut])
        with pytest.raises(BadInput):
            read_common(tmp_path)
