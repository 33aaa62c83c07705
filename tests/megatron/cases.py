"""What `make megatron` starts: recorded best plans, random legal layouts, and plans by hand.

A case is a row of verdicts.csv: it holds what the plan is built from, a digest of the command that
was started, and what Megatron-LM said ("" for nothing).
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from megatron_cases import build_plan, catalogue_model
from megatron_plans import PLANS
from moewright.codec import format_layout, parse_layout
from moewright.exporters.megatron.script import all_flags, environment_variables
from moewright.intake import catalogue
from moewright.rules.job import plan_job
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.rules.limits.megatron_limits import broken_rules, missing_options
from moewright.spec.workload import (
    AttentionBackend,
    BatchRampSpec,
    CheckpointSpec,
    CrossEntropyKernel,
    Dtype,
    ExpertKernels,
    Fusion,
    LossSpec,
    OptimizerSpec,
    SaveMode,
    TrainerSpec,
    Workload,
)

# Permutes, and the sums of experts' biases, have no switch that turns their fusion off.
_UNFUSED = tuple(fusion for fusion in Fusion if fusion not in (Fusion.PERMUTE, Fusion.EXPERT_BIAS))
VERDICTS = Path(__file__).parent / "verdicts.csv"
COLUMNS = ("kind", "model", "machine", "workload", "layout", "command", "refusal")
MACHINES = (
    *("8xA100-80GB", "8xH100", "64xH100", "256xH800", "1024xH100"),
    *("64xH200", "64xB200", "64xGB200", "256xGB300"),
)
_SEQUENCES_PER_DEVICE = 16
_PLAIN = Workload(seq_len=4096, global_batch=1)
WORKLOADS = {
    "plain": _PLAIN,
    "200 steps": replace(_PLAIN, steps=200, optimizer=OptimizerSpec(warmup_steps=20)),
    "fp8": replace(_PLAIN, precision=Dtype.FP8, grad_dtype=Dtype.BF16),
    "fp16": replace(_PLAIN, precision=Dtype.FP16),
    "fp32": replace(_PLAIN, precision=Dtype.FP32),
    "long": replace(_PLAIN, seq_len=32768),
    "balanced": replace(
        _PLAIN, loss=LossSpec(aux_coeff=1e-3, seq_aux_coeff=1e-4, global_aux_coeff=1e-3)
    ),
    "narrow moments": replace(_PLAIN, optimizer=OptimizerSpec(moment_dtype=Dtype.BF16)),
    "local layers": replace(_PLAIN, trainer=TrainerSpec(attention_backend=AttentionBackend.LOCAL)),
    "dropout": replace(
        _PLAIN,
        trainer=TrainerSpec(
            attention_dropout=0.1,
            hidden_dropout=0.1,
            unfused=_UNFUSED,
        ),
    ),
    "sequential experts": replace(
        _PLAIN, trainer=TrainerSpec(expert_kernels=ExpertKernels.SEQUENTIAL)
    ),
    "in-place loss": replace(
        _PLAIN, trainer=TrainerSpec(cross_entropy=CrossEntropyKernel.IN_PLACE)
    ),
    "saved": replace(_PLAIN, checkpoint=CheckpointSpec(every_steps=50, mode=SaveMode.ASYNC)),
    "growing": replace(_PLAIN, ramp=BatchRampSpec(ramp_start=1, ramp_increment=1, ramp_samples=1)),
}


def case_plan(row):
    """Build the plan of a case."""
    if row["kind"] == "by hand":
        return PLANS[row["model"]]
    hardware = machine(row["machine"])
    layout = parse_layout(row["layout"], world_size=hardware.count)
    workload = _sized(WORKLOADS[row["workload"]], hardware.count)
    return replace(build_plan(row["model"], layout, workload), hardware=hardware)


def _sized(workload: Workload, devices: int) -> Workload:
    batch = _SEQUENCES_PER_DEVICE * devices
    if workload.ramp.ramp_start:
        ramp = BatchRampSpec(
            ramp_start=batch // 4, ramp_increment=batch // 4, ramp_samples=10 * batch
        )
        workload = replace(workload, ramp=ramp)
    return replace(workload, global_batch=batch)


def start_command(plan) -> dict:
    """Return the command of a plan as start.py takes it, written even where it is refused."""
    return {
        "flags": [word for flag in all_flags(plan) for word in flag],
        "environment": dict(environment_variables(plan.layout)),
        "world_size": plan.layout.world_size,
        "capability": capability(plan.hardware.device.name),
    }


def capability(device: str) -> tuple[int, int]:
    """Return the compute capability of a device, by its name in the catalogue."""
    if device.removeprefix("G").startswith("B"):
        return 10, 0
    return (8, 0) if device.startswith("A100") else (9, 0)


def digest(plan) -> str:
    """Return a digest of a plan's command."""
    text = json.dumps(start_command(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def our_rules(plan) -> tuple[str, ...]:
    """Return the rules of Megatron-LM that a plan breaks by our account."""
    return tuple(f"{reason.field}: {reason.rule}" for reason in broken_rules(plan_job(plan)))


def is_expressible(plan) -> bool:
    return not any(missing_options(plan_job(plan)))


@cache
def machine(name: str):
    return catalogue.hardware(name)


def read_verdicts() -> list[dict[str, str]]:
    with VERDICTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plans_by_hand() -> list[dict[str, str]]:
    return [
        {"kind": "by hand", "model": name, "machine": "", "workload": "", "layout": ""}
        for name in PLANS
    ]


def random_cases(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return random legal layouts that Megatron-LM's options can say, some of them refused."""
    draw = random.Random(seed)
    names = catalogue.model_names()
    cases: list[dict[str, str]] = []
    while len(cases) < count:
        name = draw.choice(names)
        hardware = draw.choice(MACHINES)
        workload = draw.choice(("plain", "plain", *WORKLOADS))
        text = _random_layout(draw, catalogue_model(name), machine(hardware).count)
        row = {
            "kind": "random",
            "model": name,
            "machine": hardware,
            "workload": workload,
            "layout": text,
        }
        plan = case_plan(row)
        if not check_legality(plan_job(plan)) and is_expressible(plan):
            cases.append({**row, "layout": format_layout(plan.layout)})
    return cases


def _random_layout(draw: random.Random, model, world: int) -> str:
    """Return layout text whose degrees divide the ranks and the model's sizes."""
    moe = model.moe
    pp = draw.choice([1, 1, *(n for n in (2, 4, 8) if n <= world)])
    ranks = world // pp
    tp = draw.choice([n for n in (1, 1, 2, 4, 8) if ranks % n == 0])
    cp = draw.choice([n for n in (1, 1, 1, 2, 4) if ranks % (n * tp) == 0])
    splits = [1, 1] if pp == 1 else [n for n in (1, 2, 3, 4) if model.layers % (pp * n) == 0] or [1]
    terms = [f"tp{tp}", f"cp{cp}", f"pp{pp}", f"vpp{draw.choice(splits)}"]
    terms.append(f"mbs{draw.choice((1, 1, 2))}")
    terms.append(f"zero{draw.choice((1, 1, 1, 0, 3))}")
    if cp > 1:
        terms.append(f"cp_comm={draw.choice(('p2p', 'allgather', 'a2a', 'a2a+p2p'))}")
    modules = ["none", "none", "full", "uniform2", "layernorm", "core_attn"]
    offload = ["none", "none", "none", "optimizer", "attn_norm+qkv_linear", "core_attn+attn_proj"]
    overlap = ["none", "grad", "grad+param"] + ["grad+param+tp"] * (tp > 1)
    graphs = ["none", "none", "attn"]
    if moe:
        ep = draw.choice([n for n in divisors(moe.experts) if ranks % n == 0 and n <= 64])
        etp = draw.choice([1, 1, 1, *(n for n in (2,) if ranks % (ep * n) == 0)])
        dispatchers = ("alltoall", "alltoall", "allgather", "deepep", "hybridep")
        dispatcher = draw.choice(dispatchers if ep * etp > 1 else dispatchers[:3])
        terms += [f"ep{ep}", f"etp{etp}", f"dispatcher={dispatcher}"]
        capacity = draw.choice((0, 0, 0, 1.25))
        terms.append(f"capacity={capacity}")
        if capacity and dispatcher in ("alltoall", "hybridep") and draw.random() < 0.5:
            terms.append("capacity_fill=padded")
        modules += ["moe_act", "moe", "moe_act+layernorm"]
        offload += ["expert_fc1+moe_act", "moe_act"]
        overlap += ["ep", "ep+grad", "ep+wgrad", "ep+wgrad+grad", "ep+wgrad+grad+param"] * (ep > 1)
        overlap += ["shared"] * bool(moe.shared_ffn_size)
        graphs += ["attn+moe_router", "attn+moe_preprocess+moe_router", "full"]
    else:
        modules.append("mlp")
    terms.append(f"recompute={draw.choice(modules)}")
    terms.append(f"offload={draw.choice(offload)}")
    terms.append(f"overlap={draw.choice(overlap)}")
    terms.append(f"graphs={draw.choice(graphs)}")
    return ",".join(terms)
