"""Train a tiny MoE model on this machine, save it, and go on in another layout.

Needs the engine extra (torch) and two processes' worth of CPU; takes well under a minute.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import moewright as mw
from moewright.spec.hardware import Device, DeviceKind, DtypePeak, Fabric, Hardware
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Dtype

JOB = """
[model]
model_type = "qwen3_moe"
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 128
moe_intermediate_size = 32
num_experts = 8
num_experts_per_tok = 2
norm_topk_prob = true
decoder_sparse_step = 1
mlp_only_layers = []
vocab_size = 512
max_position_embeddings = 256
rms_norm_eps = 1e-6
rope_theta = 10000.0
tie_word_embeddings = false
hidden_act = "silu"

[data]
train = "data/train"
heldout = "data/heldout"

[train]
seq_len = 64
global_batch = 8
steps = 10
decay_steps = 20
precision = "fp32"
lr = 3e-3
aux_coeff = 1e-2
"""


def describe_laptop() -> Hardware:
    """Return two CPU ranks with assumed figures; `moewright bench machine` measures real ones."""

    def assume(value: float) -> Sourced:
        return Sourced(value=value, kind=SourceKind.ASSUMED, source="a guess")

    device = Device(
        name="laptop",
        kind=DeviceKind.CPU,
        memory_bytes=assume(4e9),
        memory_Bps=assume(1e10),
        peaks=(DtypePeak(dtype=Dtype.FP32, rate=assume(1e11)),),
        rates=(),
    )
    fabric = Fabric(
        domain_size=2,
        devices_per_node=2,
        domain_Bps=assume(1e9),
        network_Bps=assume(1e9),
        domain_latency_s=assume(1e-5),
        network_latency_s=assume(1e-5),
    )
    return Hardware(name="laptop", count=2, device=device, fabric=fabric)


def main() -> None:
    """Build data, train in one layout, train on in another."""
    folder = Path(tempfile.mkdtemp())
    # A few files of Python's own library are the text; `data build` takes a folder in their place.
    limits = ["--vocab-size", "512", "--limit", "500KB"]
    build = ["data", "build", "--out", str(folder / "data"), *limits]
    subprocess.run([sys.executable, "-m", "moewright", *build], check=True)
    job = folder / "job.toml"
    job.write_text(JOB)

    plan = mw.estimate(job, "ep2,mbs2", on=describe_laptop())
    run = mw.train(plan, folder / "run")
    print(f"step {run.steps[-1].step}: loss {run.steps[-1].loss:.3f} in {plan.layout}")

    # A checkpoint is read by any layout: here the pipeline's two stages take what ep2 saved.
    longer = replace(plan.workload, steps=20)
    moved = mw.estimate(replace(plan, workload=longer), "pp2,mbs2")
    run = mw.train(moved, folder / "run")
    print(f"step {run.steps[-1].step}: loss {run.steps[-1].loss:.3f} in {moved.layout}")


if __name__ == "__main__":
    main()
