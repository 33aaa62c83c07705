"""Slow runs with a planted fault: what takes it away is first or second in the advice.

The scripts are exports of the planner's best plans with one fault each; their logs are made. What
the advice says to write is written into the script, which is read back and must be faster.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import moewright as mw
from diagnosis.test_megatron_log import LINE
from moewright.api.diagnosing import Diagnosis
from moewright.api.launch_scripts import find_better_layouts
from moewright.codec import parse_layout
from moewright.diagnosis.advice import Advice, JobChange
from moewright.exporters.megatron.script import render_megatron_script
from moewright.report.finding_sections import build_advice_section
from moewright.search.search import build_plan
from moewright.spec.finding import Basis
from moewright.spec.layout import (
    DispatcherKind,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.plan import Plan
from moewright.spec.stage_string import EVEN_SPLIT
from moewright.spec.workload import AttentionBackend, ExpertKernels, Fusion

JOBS = {
    "small": ("Qwen3-30B-A3B", "16xH100", 256, 4096),
    "wide": ("Mixtral-8x7B", "32xH100", 256, 4096),
    "brief": ("Qwen3-30B-A3B", "64xH100", 64, 4096),
    "long": ("Qwen3-30B-A3B", "16xH100", 32, 32768),
    "dense": ("Llama-3.1-70B", "64xH100", 256, 4096),
    "short": ("Qwen3-30B-A3B", "16xH100", 512, 1024),
    "air": ("GLM-4.5-Air", "32xH100", 256, 4096),
}


@cache
def best_plan(job: str) -> Plan:
    model, on, batch, seq_len = JOBS[job]
    start = "tp8" if job == "dense" else "ep8"
    plan = mw.estimate(model, start, on=on, global_batch=batch, seq_len=seq_len)
    return find_better_layouts(plan).plans[0]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault: values of the layout or the kernels that the best plan has not, and its words."""

    job: str
    words: str  # a regular expression that the change which takes it away matches
    layout: dict[str, object] | None = None
    trainer: dict[str, object] | None = None
    timers: str = ""
    tail: str = ""
    spikes: bool = False
    growth: float = 0.0

    def plan(self) -> Plan:
        best = best_plan(self.job)
        layout = replace(best.layout, **(self.layout or {}))
        workload = replace(
            best.workload, trainer=replace(best.workload.trainer, **(self.trainer or {}))
        )
        return build_plan(best.model, workload, best.hardware, layout)


PLAIN_EXCHANGE = DispatcherKind.ALL_TO_ALL
FOUR = {"pp": 4, "vpp": 1, "schedule": Schedule.ONE_F_ONE_B, "stages": EVEN_SPLIT}
BARE = {"graphs": (), "overlap": (), "offload": ()}
PLAIN = {"vpp": 1, "schedule": Schedule.ONE_F_ONE_B, "stages": EVEN_SPLIT}
PLANTED = {
    "experts one by one": Planted(
        job="small",
        words="one grouped product",
        trainer={"expert_kernels": ExpertKernels.SEQUENTIAL},
    ),
    "everything recomputed": Planted(
        job="small",
        words="recompute full",
        layout={"recompute": (Recompute.FULL,), "overlap": (), "graphs": (), "offload": ()},
    ),
    "tensor parallelism in place of expert parallelism": Planted(
        job="wide",
        words=r"\btp 8 ->",
        layout={"tp": 8, "sp": True, "ep": 1, "etp": 8, **FOUR, "dispatcher": PLAIN_EXCHANGE},
    ),
    "experts cut as attention is": Planted(
        job="wide", words=r"\betp 8 ->", layout={"etp": 8, "ep": 1, **FOUR}
    ),
    "all-gather of tokens": Planted(
        job="small",
        words="dispatcher allgather",
        layout={"dispatcher": DispatcherKind.ALL_GATHER, "overlap": ()},
    ),
    "scores of attention in memory": Planted(
        job="long",
        words="attention in tiles",
        trainer={"attention_backend": AttentionBackend.UNFUSED},
    ),
    "a micro-batch for a larger machine": Planted(
        job="wide", words=r"\b(mbs|pp) ", layout={"mbs": 8, "recompute": (Recompute.FULL,), **BARE}
    ),
    "a pipeline without virtual stages": Planted(
        job="wide", words=r"\b(vpp 1|pp 8) ->", layout={**PLAIN, "pp": 8, "ep": 4, "etp": 1}
    ),
    "too many stages": Planted(
        job="small",
        words=r"\bpp 16 ->",
        layout={**PLAIN, "pp": 16, "ep": 1, "overlap": (), "dispatcher": PLAIN_EXCHANGE},
    ),
    "context parallelism of short sequences": Planted(
        job="small", words=r"\bcp 4 ->", layout={"cp": 4, "overlap": ()}
    ),
    "a pipeline of single layers": Planted(
        job="small", words=r"\b(pp|vpp) ", layout={**PLAIN, "pp": 8, "ep": 2, "overlap": ()}
    ),
    "an optimizer in host memory": Planted(
        job="wide", words="offload .*optimizer", layout={"offload": (Offload.OPTIMIZER,)}
    ),
    "activations in host memory": Planted(
        job="wide",
        words="offload .*(core_attn|expert_fc1)",
        layout={
            "offload": (Offload.CORE_ATTN, Offload.EXPERT_FC1, Offload.MOE_ACT),
            "recompute": (),
            "graphs": (),
        },
    ),
    "no exchange by a library": Planted(
        job="small",
        words="dispatcher alltoall",
        layout={"dispatcher": PLAIN_EXCHANGE, "overlap": ()},
    ),
    "nothing overlapped": Planted(job="brief", words="overlap .*grad", layout={"overlap": ()}),
    "weights sharded in a pipeline": Planted(
        job="wide", words="zero 3", layout={"zero": 3, "graphs": (), "overlap": (), "offload": ()}
    ),
    "no fused sums of gradients": Planted(
        job="wide",
        words="fused activations",
        trainer={"unfused": (Fusion.ACTIVATION, Fusion.WEIGHT_GRAD)},
    ),
    # Of jobs that nothing was tuned on, drawn on 2026-11-27.
    "tensor parallelism over nodes": Planted(
        job="dense",
        words=r"\btp 16 ->",
        layout={"tp": 16, "sp": True, **PLAIN, "pp": 1, "overlap": ()},
    ),
    "no sequence parallelism": Planted(
        job="dense",
        words=r"\bsp off -> on",
        layout={"sp": False, "overlap": (Overlap.GRAD, Overlap.PARAM)},
    ),
    "a dense pipeline without virtual stages": Planted(
        job="dense", words=r"\b(pp|vpp) ", layout={**PLAIN, "pp": 8, "overlap": ()}
    ),
    "products wait for their rows": Planted(
        job="dense", words="overlap none ->", layout={"overlap": ()}
    ),
    "dense sequences cut": Planted(
        job="dense", words=r"\bcp 4 ->", layout={"cp": 4, "overlap": ()}
    ),
    "layers recomputed that fit": Planted(
        job="dense", words="recompute full", layout={"recompute": (Recompute.FULL,), "graphs": ()}
    ),
    "one short sequence a micro-batch": Planted(
        job="short", words=r"\bmbs 1 ->", layout={"mbs": 1, **BARE}
    ),
    "experts on few ranks": Planted(
        job="small",
        words=r"\bep 2 ->",
        layout={"ep": 2, "etp": 1, **FOUR, **BARE, "dispatcher": PLAIN_EXCHANGE},
    ),
    "rows moved by torch's own operations": Planted(
        job="air", words="moves of rows", trainer={"unfused": (Fusion.PERMUTE,)}
    ),
    "experts cut on another model": Planted(
        job="air",
        words=r"\betp 4 ->",
        layout={"etp": 4, "ep": 2, "dispatcher": PLAIN_EXCHANGE, "overlap": (), "graphs": ()},
    ),
    "a slow loader": Planted(job="small", words="loader workers", timers="batch-generator"),
    "late ranks": Planted(job="small", words="late rank", timers="all-grads-sync"),
    "garbage collected on its own": Planted(job="small", words="garbage", spikes=True),
    "steps that grow": Planted(job="small", words="accumulates over steps", growth=0.02),
    "fragmented memory": Planted(
        job="small",
        words="segments",
        tail=(
            "[Rank 0] (after 1 iterations) memory (MB) | allocated: 30000.5 | max allocated: "
            "60000.0 | reserved: 70000.0 | max reserved: 78000.0\n"
            "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
            "79.11 GiB"
        ),
    ),
}

# Of `make test`: a choice of kernels, and a fault that a log alone shows.
QUICK = ("a slow loader",)


def write_run(folder: Path, planted: Planted) -> Plan:
    """Write the script and the log of a slow run, and return the plan of its script."""
    plan = planted.plan()
    script = folder / "run.sh"
    text = str(render_megatron_script(plan))
    if planted.spikes:  # an export collects garbage by itself
        text = re.sub(r" +--manual-gc\b.*\n", "", text)
    script.write_text(text)
    batch = plan.workload.global_batch
    lines = []
    for n in range(1, 41):
        step_s = 1.1 * plan.estimate.step_s * (1 + planted.growth * n)
        if planted.spikes and n % 5 == 0:
            step_s *= 3
        line = LINE.format(n=n, samples=batch * n, ms=1e3 * step_s, tflops=100.0)
        lines.append(re.sub(r"global batch size: +\d+", f"global batch size: {batch}", line))
        if planted.timers:
            lines.append(timer_block(planted.timers, 1e3 * step_s))
    (folder / "run.log").write_text("\n".join((*lines, planted.tail)))
    return mw.read_flags(script, on=JOBS[planted.job][1]).plan


def timer_block(name: str, step_ms: float) -> str:
    """Return timers of a step of which the named one takes a third.

    A sum of gradients takes it on the slowest rank alone.
    """
    slow_ms = step_ms / 3
    fast_ms = slow_ms if name == "batch-generator" else 10.0
    timers = {
        "forward-backward": (0.9 * step_ms, 0.9 * step_ms),
        "forward-compute": (0.2 * step_ms, 0.2 * step_ms),
        "backward-compute": (0.3 * step_ms, 0.3 * step_ms),
        "batch-generator": (5.0, 5.0),
        "all-grads-sync": (10.0, 10.0),
        name: (fast_ms, slow_ms),
    }
    lines = (
        f"    {timer} {'.' * (48 - len(timer))}: ({low:.2f}, {high:.2f})"
        for timer, (low, high) in timers.items()
    )
    return "\n".join(("(min, max) time across ranks (ms):", *lines))


def apply_advice(script: str, advice: Advice) -> str:
    """Return a script with what the advice says to write, to leave out and to export."""
    written: dict[str, list[str]] = {}
    exported = dict(word.split("=", 1) for word in shlex.split(advice.export))
    for word in shlex.split(advice.write):
        if word.startswith("--"):
            written[word] = []
        elif written:
            written[list(written)[-1]].append(word)
        else:
            exported.update([word.split("=", 1)])
    gone = {*written, *advice.leave_out.split()}
    kept = [
        line
        for line in script.splitlines()
        if not (line.strip().startswith("--") and line.split()[0] in gone)
        and not (line.startswith("export ") and line.split()[1].split("=")[0] in exported)
    ]
    kept[-1] = kept[-1].removesuffix(" \\")
    added = [shlex.join((name, *values)) for name, values in written.items()]
    head = [f"export {name}={value}" for name, value in exported.items()]
    return "\n".join((kept[0], *head, " \\\n  ".join(("\n".join(kept[1:]), *added)), ""))


def rank_of(diagnosis: Diagnosis, words: str) -> int:
    """Return the place of the change that takes a fault away, from 1; 99 where none does."""
    assert diagnosis.advice is not None
    places = [
        place
        for place, change in enumerate(diagnosis.advice.changes, 1)
        if re.search(words, change.text)
    ]
    return min(places, default=99)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in PLANTED],
)
def test_a_planted_fault_is_first_or_second_and_what_to_write_is_faster(name, tmp_path):
    planted = PLANTED[name]
    on = JOBS[planted.job][1]
    slow = write_run(tmp_path, planted)
    diagnosis = mw.diagnose(tmp_path / "run.log", script=tmp_path / "run.sh", on=on)
    advice = diagnosis.advice
    assert advice is not None
    texts = [change.text for change in advice.changes]
    assert rank_of(diagnosis, planted.words) <= 2, texts
    assert any(change.adds for change in advice.changes)
    assert len(texts) == len(set(texts))
    (tmp_path / "faster.sh").write_text(apply_advice((tmp_path / "run.sh").read_text(), advice))
    after = mw.read_flags(tmp_path / "faster.sh", on=on).plan
    assert after.layout == parse_layout(advice.after, world_size=after.layout.world_size)
    if planted.tail:  # what ran out of memory gives some of the step for it
        assert after.estimate.peak_bytes < slow.estimate.peak_bytes
    else:
        assert after.estimate.step_s <= slow.estimate.step_s
    if planted.layout or planted.trainer:
        best = best_plan(planted.job)
        assert after.estimate.step_s < slow.estimate.step_s
        assert after.estimate.step_s <= 1.02 * best.estimate.step_s


@pytest.mark.parametrize(
    ("adds", "words"),
    [
        ((True, True), "all 2 together: "),
        ((True,), "with it: "),
        ((True, False, True), "1, 3 together, beside them the rest adds nothing: "),
        ((True, False), "1, beside it the rest adds nothing: "),
    ],
)
def test_what_adds_nothing_beside_the_other_changes_is_said(adds, words):
    changes = tuple(
        JobChange(text=f"c{n}", step_share=-0.1, basis=Basis.PREDICTED, evidence="", adds=add)
        for n, add in enumerate(adds)
    )
    advice = Advice(
        changes=changes,
        training=(),
        before_s=2.0,
        after_s=1.0,
        after="tp1",
        verdict="fits",
        peak_bytes=1,
    )
    (settings,) = build_advice_section(advice).sections
    assert any(str(line).startswith(words) for line in settings.lines)
