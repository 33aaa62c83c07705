"""Job files: sections onto Workload, paths, overrides, and located refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moewright.intake import catalogue, job
from moewright.intake.hf import build_config
from moewright.spec.errors import BadInput
from moewright.spec.workload import DocumentMasking, Dtype

TEXT = """
[model]
config = "shape/config.json"

[data]
train = "../data/train"
heldout = "/abs/heldout"
documents = "restarted"

[layout]
text = "ep2,mbs2"

[train]
steps = 60
seq_len = 512
global_batch = 16
lr = 2e-3
warmup_steps = 10
precision = "bf16"
aux_coeff = 0.01
nproc = 2
hardware = "machine.toml"

[checkpoint]
every_steps = 30
"""


def write(folder: Path, text: str = TEXT) -> Path:
    shape = folder / "shape"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(
        json.dumps(build_config(catalogue.model("Qwen3-30B-A3B"))), encoding="utf-8"
    )
    path = folder / "quickstart.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_sections_map_onto_the_workload(tmp_path: Path) -> None:
    read = job.read_job(write(tmp_path))
    assert read.model.layers == 48
    work = read.workload
    assert (work.steps, work.seq_len, work.global_batch, work.precision) == (
        60,
        512,
        16,
        Dtype.BF16,
    )
    assert (work.optimizer.lr, work.optimizer.warmup_steps, work.loss.aux_coeff) == (2e-3, 10, 0.01)
    assert work.checkpoint.every_steps == 30
    assert work.data.train == str(tmp_path.parent / "data" / "train")
    assert (work.data.heldout, work.data.tokenizer) == ("/abs/heldout", "")
    assert work.data.documents is DocumentMasking.RESTARTED
    assert (read.layout_text, read.nproc, read.hardware) == (
        "ep2,mbs2",
        2,
        str(tmp_path / "machine.toml"),
    )


def test_overrides(tmp_path: Path) -> None:
    options = (
        "train.lr=1e-3",
        "train.precision=fp32",
        "train.steps = 5",
        "checkpoint.keep=4",
        "layout.text=ep1",
    )
    read = job.read_job(write(tmp_path), options)
    assert read.workload.optimizer.lr == 1e-3
    assert read.workload.precision is Dtype.FP32
    assert (read.workload.steps, read.workload.checkpoint.keep, read.layout_text) == (5, 4, "ep1")


def test_keys_of_loss_scaling_and_growing_batches(tmp_path: Path) -> None:
    options = (
        "train.precision=fp16",
        "train.loss_scale_window=50",
        "train.ramp_start=4",
        "train.ramp_increment=4",
    )
    work = job.read_job(write(tmp_path), options).workload
    assert (work.scaling.loss_scale_window, work.scaling.initial_loss_scale) == (50, 65536.0)
    assert (work.ramp.ramp_start, work.ramp.ramp_increment, work.ramp.ramp_samples) == (4, 4, 0)


def test_least_job_takes_defaults(tmp_path: Path) -> None:
    text = '[model]\nconfig = "qwen3-30b-a3b"\n[train]\nseq_len = 8\nglobal_batch = 2\n'
    read = job.read_job(write(tmp_path, text))
    assert read.workload.data.documents is DocumentMasking.JOINED
    assert (read.layout_text, read.nproc, read.hardware) == ("", 1, job.DEFAULT_HARDWARE)
    assert read.workload.optimizer.beta2 == 0.95


def test_layout_keys_become_text(tmp_path: Path) -> None:
    keys = (
        'tp = 2\nsp = true\nrecompute = ["moe_act", "layernorm"]\n'
        'layout = "Et*3|(tt|)*29,m|L"\ncapacity = 1.5\n'
    )
    read = job.read_job(write(tmp_path, TEXT.replace('text = "ep2,mbs2"\n', keys)))
    assert (
        read.layout_text
        == "tp=2,sp=1,recompute=moe_act+layernorm,layout='Et*3|(tt|)*29,m|L',capacity=1.5"
    )


def test_inline_model(tmp_path: Path) -> None:
    fields = "\n".join(
        f"{key} = {json.dumps(value)}"
        for key, value in build_config(catalogue.model("Qwen3-30B-A3B")).items()
        if value is not None
    )
    read = job.read_job(write(tmp_path, TEXT.replace('config = "shape/config.json"', fields)))
    assert read.model.name == "quickstart"
    assert read.model.moe is not None
    assert read.model.moe.experts == 128


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "steps = 60",
            "stpes = 60",
            "quickstart.toml: train.stpes: unknown key; nearest legal value: steps",
        ),
        (
            "steps = 60",
            "qqqqqqqq = 60",
            "quickstart.toml: train.qqqqqqqq: unknown key; known here: seq_len",
        ),
        (
            "[checkpoint]",
            "[chekpoint]",
            "quickstart.toml: chekpoint: unknown section; nearest legal value: checkpoint",
        ),
        (
            "every_steps",
            "evry_steps",
            "checkpoint.evry_steps: unknown key; nearest legal value: every_steps",
        ),
        (
            'train = "../',
            'trian = "../',
            "quickstart.toml: data.trian: unknown key; nearest legal value: train",
        ),
        ("steps = 60", "steps = true", "train.steps=true: must be a whole number"),
        ('text = "ep2,mbs2"', "etp = true", "layout.etp=true: must be a number"),
        (
            "steps = 60",
            "steps = 60\nbeta1 = 1.0",
            "must be in 0..0.999999999; nearest legal value: 0.999999999",
        ),
        (
            "steps = 60",
            "steps = -1",
            "train.steps=-1: must be in 0..1000000000; nearest legal value: 0",
        ),
        (
            "steps = 60",
            "steps = 60\nramp_start = 4",
            "train.ramp_increment=0: must be in 1..16; nearest legal value: 1",
        ),
        (
            "steps = 60",
            "steps = 60\nmin_loss_scale = 1e5",
            "train.min_loss_scale=100000: must be in 1..65536",
        ),
        ("seq_len = 512", "seq_len = 0", "quickstart.toml: train.seq_len=0: must be in 1.."),
        ("seq_len = 512", 'seq_len = "512"', "quickstart.toml: train.seq_len="),
        ("seq_len = 512", "", "quickstart.toml: train.seq_len: is missing"),
        ("lr = 2e-3", "lr = nan", "quickstart.toml: train.lr=nan: must be a finite number"),
        ('"bf16"', '"bf61"', "nearest legal value: bf16"),
        ("ep2,mbs2", "epp2", "quickstart.toml: layout.epp"),
        ('"ep2,mbs2"', '"ep2"\npp = 2', "layout.pp: cannot be given together with layout.text"),
        (
            "nproc = 2",
            "nproc = true",
            "train.nproc=true: must be a whole number in 1..1000000; nearest legal value: 1",
        ),
        (
            "nproc = 2",
            "nproc = 0",
            "train.nproc=0: must be a whole number in 1..1000000; nearest legal value: 1",
        ),
        ('"machine.toml"', '"H80"', "train.hardware=H80: must be a known device"),
        ("shape/config.json", "shape/confg.json", "no such file; nearest legal value:"),
        ("shape/config.json", "qwen3-30b", "nearest legal value: Qwen/Qwen3-30B-A3B"),
        ('config = "shape/config.json"', "", "quickstart.toml: model: needs config"),
        (
            'config = "shape/config.json"',
            'model_type = "mixtrel"',
            'quickstart.toml: model.model_type="mixtrel"',
        ),
        ('"restarted"', '"bound"', 'quickstart.toml: data.documents="bound"'),
        ("[data]", "[data", "is not TOML"),
        ("[train]", "[[train]]", "quickstart.toml: train: must be a section"),
    ],
)
def test_refusals_name_section_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(BadInput) as caught:
        job.read_job(write(tmp_path, TEXT.replace(old, new, 1)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["lr=1", "train.lr", "=", ".a=1", "train.=3", "modle.config=x"]
)
def test_overrides_that_are_none(tmp_path: Path, override: str) -> None:
    with pytest.raises(BadInput):
        job.read_job(write(tmp_path), (override,))


def test_missing_file(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        job.read_job(tmp_path / "quickstrat.toml")
