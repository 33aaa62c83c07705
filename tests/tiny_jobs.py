"""Tiny jobs for tests that train.

The model has the shape of Qwen3-MoE and about 100k parameters; the corpus has a few pages.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moewright.codec import parse_layout
from moewright.engine.checkpoint import LocalShard, load_checkpoint, read_index, single_process
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES
from moewright.engine.data.build_corpus import CorpusOptions, build_corpus
from moewright.engine.data.tokenizer import TokenizerKind
from moewright.spec.hardware import Device, DeviceKind, DtypePeak, Fabric, Hardware
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RopeSpec,
    RouterSpec,
)
from moewright.spec.plan import Estimate, Plan, Verdict
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import DataSpec, Dtype, LossSpec, OptimizerSpec, Routing, Workload

VOCABULARY = 320

MODEL = ModelSpec(
    name="tiny-moe",
    family="qwen3_moe",
    hidden_size=32,
    layers=3,
    vocab_size=VOCABULARY,
    attention=AttentionSpec(
        kind=AttentionKind.GQA,
        heads=4,
        kv_heads=2,
        head_dim=16,
        v_head_dim=16,
        qk_norm=QkNorm.PER_HEAD,
        rope=RopeSpec(theta=10000.0),
    ),
    dense_ffn_size=48,
    moe=MoeSpec(experts=8, ffn_size=16, router=RouterSpec(top_k=2)),
    moe_layers=(True, False, True),
    # Wide, so that routing has clear margins and gradients are not tiny.
    initializer_range=0.2,
)

DENSE = replace(MODEL, name="tiny-dense", family="qwen3", moe=None, moe_layers=(False,) * 3)


def write_corpus(folder: Path, *, documents: int = 30, words: int = 400) -> DataSpec:
    """Write a small corpus of made-up words in byte tokens, up to `words` words a document."""
    rng = random.Random(7)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(200)]
    text_folder = folder / "text"
    text_folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        length = words
        if words != 400:
            length = rng.randint(1, words)
        (text_folder / f"{number:03d}.txt").write_text(" ".join(rng.choices(vocabulary, k=length)))
    options = CorpusOptions(tokenizer=TokenizerKind.BYTES, heldout_fraction=0.2)
    corpus = build_corpus(text_folder, folder / "data", options)
    return corpus.data


def build_workload(data: DataSpec, *, steps: int = 4, **changes: object) -> Workload:
    """Build a workload of eight sequences of 32 tokens a step, in fp32, without clipping."""
    base = Workload(
        routing=Routing.BALANCED,
        seq_len=32,
        global_batch=8,
        steps=steps,
        precision=Dtype.FP32,
        eval_batches=1,
        ledger_step=1,
        optimizer=OptimizerSpec(lr=1e-2, warmup_steps=2, clip_norm=0.0, eps=1e-6),
        loss=LossSpec(aux_coeff=0.02, z_coeff=0.001),
        data=data,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def build_plan(
    workload: Workload, layout: str, *, world_size: int, model: ModelSpec = MODEL
) -> Plan:
    """Build a plan for this machine's CPU.

    The estimate is empty: the engine does not read it.
    """
    return Plan(
        model=model,
        workload=workload,
        hardware=_hardware(world_size),
        layout=parse_layout(layout, world_size=world_size),
        estimate=_NO_ESTIMATE,
        fingerprint="test",
    )


def read_checkpoint(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load everything that a checkpoint holds, as whole tensors by name."""
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=SAFETENSORS_DTYPES[entry.dtype])
        for entry in read_index(checkpoint).tensors
    }
    shards = [
        LocalShard(
            name=name,
            global_shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
        )
        for name, tensor in tensors.items()
    ]
    load_checkpoint(checkpoint, shards=shards, comm=single_process())
    return tensors


def read_state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Load what a run saved after a step."""
    return read_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines that a run logged about its steps."""
    lines = map(json.loads, (run_dir / "steps.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def assert_first_gradients_equal(run_dir: Path, reference: Path) -> None:
    """Assert that two runs had the same gradient of every parameter in their first step.

    After one unclipped step the first moment of AdamW is (1 - beta1) times the gradient.
    """
    expected = read_state(reference, 1)
    actual = read_state(run_dir, 1)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        if name.startswith("optim/exp_avg/"):
            error = (actual[name] - value).norm() / value.norm()
            assert error <= 3e-5, (name, float(error))


def _assumed(value: float) -> Sourced:
    return Sourced(value=value, kind=SourceKind.ASSUMED, source="test")


def _hardware(count: int) -> Hardware:
    return Hardware(
        name="test CPU",
        count=count,
        device=Device(
            name="test CPU",
            kind=DeviceKind.CPU,
            memory_bytes=_assumed(4e9),
            memory_Bps=_assumed(1e10),
            peaks=(
                DtypePeak(dtype=Dtype.FP32, rate=_assumed(1e11)),
                DtypePeak(dtype=Dtype.BF16, rate=_assumed(1e11)),
            ),
            rates=(),
        ),
        fabric=Fabric(
            domain_size=count,
            devices_per_node=count,
            domain_Bps=_assumed(1e9),
            network_Bps=_assumed(1e9),
            domain_latency_s=_assumed(1e-5),
            network_latency_s=_assumed(1e-5),
        ),
    )


_NO_ESTIMATE = Estimate(
    ledgers=(),
    peak_rank=0,
    peak_bytes=0,
    capacity_bytes=1,
    verdict=Verdict.FITS,
    margin_bytes=1,
    peak_sd_bytes=1,
    step_sd=0.1,
    largest="nothing",
    step_s=1.0,
    shares=(),
    micro_batches=1,
    bubble_fraction=0.0,
    tokens_per_s_per_device=0.0,
    model_flops_per_step=0.0,
    tflops_per_device=0.0,
    mfu=0.0,
    hfu=0.0,
    assumptions=(),
)
