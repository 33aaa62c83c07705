"""Scores of a search against full estimates: the same seconds and the same bytes, whatever the
layout."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from moewright.codec import format_layout
from moewright.cost.estimate import estimate
from moewright.cost.pipeline_time import closed_form_s
from moewright.intake import catalogue
from moewright.rules.legality import check_legality
from moewright.search.screening import Screener
from moewright.search.space import build_search_space, degree_groups
from moewright.spec.layout import Layout
from moewright.spec.ledger import StepPhase
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.workload import Dtype, Workload

ALL = float("inf")
# Seconds: the number of buckets is estimated. Bytes: so is what fills them up to whole shards.
SECONDS, BYTES = 2e-3, 1e-3
CASES = (
    ("Qwen3-30B-A3B", "32xH100", Workload(seq_len=4096, global_batch=256), ""),
    ("Qwen3-30B-A3B", "64xH100", Workload(seq_len=16384, global_batch=128), "cp4"),
    ("Qwen3-235B-A22B", "256xH800", Workload(seq_len=4096, global_batch=2048), ""),
    (
        "DeepSeek-V3",
        "1024xH800",
        Workload(seq_len=4096, global_batch=8192, precision=Dtype.FP8),
        "",
    ),
    ("Mixtral-8x7B-v0.1", "64xA100", Workload(seq_len=4096, global_batch=256), "zero3"),
    ("Qwen3-8B", "16xH100", Workload(seq_len=4096, global_batch=256), ""),
    (
        "Qwen3-235B-A22B",
        "256xH800",
        Workload(seq_len=4096, global_batch=2048),
        "offload=optimizer+core_attn",
    ),
    ("Qwen3-8B", "16xH100", Workload(seq_len=16384, global_batch=256), "recompute=loss+layernorm"),
)


def _drawn(
    model: str, on: str, workload: Workload, fixed: str, *, count: int
) -> list[tuple[Layout, float, float]]:
    """Random scored layouts of a case with their seconds and bytes, as many with uneven stages as
    without."""
    spec, hardware, draw = catalogue.model(model), catalogue.hardware(on), random.Random(7)
    space = build_search_space(spec, workload, hardware, fixed)
    scout = Screener(space)
    every = list(degree_groups(space))
    found: list[tuple[Layout, float, float]] = []
    while len(found) < count:
        group = draw.choice(every)
        for scores in scout.screen(group, room_bytes=ALL, below_s=ALL):
            priced = np.isfinite(scores.step_s)
            uneven = np.array([bool(pipe.stages) for pipe in scores.pipelines.shapes])
            wanted = priced & (uneven == bool(len(found) % 2))[:, None, None]
            places = np.argwhere(wanted if wanted.any() else priced).tolist()
            if places:
                place = tuple(draw.choice(places))
                layout = scout.layout(scores, *place)
                found.append((layout, float(scores.step_s[place]), float(scores.peak_bytes[place])))
    return found


@pytest.mark.parametrize(("model", "on", "workload", "fixed"), CASES)
def test_scores_are_what_estimates_say(model: str, on: str, workload: Workload, fixed: str) -> None:
    spec, hardware = catalogue.model(model), catalogue.hardware(on)
    for layout, step_s, peak_bytes in _drawn(model, on, workload, fixed, count=10):
        text = format_layout(layout)
        assert not check_legality(spec, workload, layout), text
        full = estimate(spec, workload, hardware, layout)
        assert step_s == pytest.approx(_by_totals(full, layout), rel=SECONDS), text
        assert peak_bytes == pytest.approx(full.peak_bytes, rel=BYTES), text


def _by_totals(full: Estimate, layout: Layout) -> float:
    """A full estimate's step with the bubble that a search takes: by the totals of the ranks, not
    by their chunks."""
    shares = {share.part: share.seconds for share in full.shares}
    count, work = full.micro_batches, (StepPhase.FORWARD, StepPhase.BACKWARD)
    totals = [
        sum(row.seconds for row in ledger.time if row.phase in work) / count
        for ledger in full.ledgers
    ]
    still = closed_form_s(
        max(totals), sum(totals), pp=layout.pp, vpp=layout.vpp, micro_batches=count, transfer_s=0.0
    )
    return full.step_s - shares.get(TimePart.BUBBLE, 0.0) + float(still) - count * max(totals)


def test_what_pricing_settles_is_the_fastest_way() -> None:
    """Of one cut, no dispatcher, exchange of context or overlap beats those that the scores
    chose."""
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("64xH100")
    workload = Workload(seq_len=16384, global_batch=128)
    text = "tp2,cp2,pp2,vpp2,ep8,etp1,mbs1,layout='Et*12|(t*12|)*2t*12L'"
    best: dict[str, float] = {}
    dispatchers = ("dispatcher=alltoall", "dispatcher=deepep")
    overlaps = ("overlap=none", "overlap=grad+param", "overlap=tp", "overlap=ep", "graphs=none")
    for extra in ("", *dispatchers, *overlaps, "cp_comm=p2p", "cp_comm=allgather", "cp_comm=a2a"):
        space = build_search_space(model, workload, hardware, f"{text},{extra}" if extra else text)
        scout = Screener(space)
        best[extra] = min(
            float(scores.step_s.min())
            for group in degree_groups(space)
            for scores in scout.screen(group, room_bytes=ALL, below_s=ALL)
        )
    assert best[""] == pytest.approx(min(best.values()), rel=1e-12)
    assert max(best.values()) > best[""]


@pytest.mark.parametrize(("model", "on", "workload", "fixed"), CASES)
def test_no_price_is_below_the_floor_of_its_group(
    model: str, on: str, workload: Workload, fixed: str
) -> None:
    """A floor takes no price of the pipelines; where it is high enough none is made."""
    hardware, draw = catalogue.hardware(on), random.Random(3)
    space = build_search_space(catalogue.model(model), workload, hardware, fixed)
    scout, near = Screener(space), 0.0
    every = list(degree_groups(space))
    for group in draw.sample(every, min(20, len(every))):
        for scores in scout.screen(group, room_bytes=ALL, below_s=ALL):
            least = float(scores.step_s.min())
            assert 0 < scores.floor_s <= least, format_layout(scores.base)
            near = max(near, scores.floor_s / least)
    assert near > 0.8


def test_a_forward_of_one_micro_batch_runs_beside_nothing() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("64xH100")
    text = "tp1,cp1,pp1,ep32,etp1,mbs1,overlap=ep"
    workload = Workload(seq_len=4096, global_batch=64)
    for layout, _, peak_bytes in _drawn("Qwen3-30B-A3B", "64xH100", workload, text, count=2):
        assert peak_bytes == pytest.approx(
            estimate(model, workload, hardware, layout).peak_bytes, rel=BYTES
        )


def test_bounds_lose_nothing_that_is_faster() -> None:
    """Leaving out what cannot be faster than a bound leaves the fastest as it is."""
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    space = build_search_space(model, Workload(seq_len=4096, global_batch=128), hardware, "etp1")
    limit = hardware.device.memory_bytes.value
    whole = Screener(space)
    fastest: dict[Layout, float] = {}
    for group in degree_groups(space):
        for scores in whole.screen(group, room_bytes=limit, below_s=ALL):
            fastest |= _of_each_pipe(whole, scores)
    bound = sorted(fastest.values())[20]
    bounded = Screener(space)
    found: dict[Layout, float] = {}
    for group in degree_groups(space):
        for scores in bounded.screen(group, room_bytes=limit, below_s=bound):
            found |= _of_each_pipe(bounded, scores)
    kept = {layout: step_s for layout, step_s in fastest.items() if step_s < bound}
    assert len(kept) > 10
    assert {layout: found[layout] for layout in kept} == kept


def _of_each_pipe(scout: Screener, scores) -> dict[Layout, float]:  # type: ignore[no-untyped-def]
    found = {}
    for pipe, steps in enumerate(scores.step_s):
        work, keep = np.unravel_index(int(steps.argmin()), steps.shape)
        if np.isfinite(steps[work, keep]):
            found[scout.layout(scores, pipe, int(work), int(keep))] = float(steps[work, keep])
    return found


def test_zero_0_and_replays_without_need_are_never_faster() -> None:
    """The rules by which a search leaves out zero=0, and heavier recompute where less fits."""
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    workload = Workload(seq_len=4096, global_batch=128)
    layout = Layout(world_size=16, ep=8, pp=2, mbs=1)
    plain = estimate(model, workload, hardware, layout)
    without = estimate(model, workload, hardware, replace(layout, zero=0))
    assert without.step_s >= plain.step_s
    assert without.peak_bytes >= plain.peak_bytes
    space = build_search_space(
        model, workload, hardware, "tp1,cp1,pp2,vpp1,ep8,etp1,mbs1,overlap=none,zero1"
    )
    scout = Screener(space)
    for group in degree_groups(space):
        for scores in scout.screen(group, room_bytes=ALL, below_s=ALL):
            assert (scores.step_s >= scores.step_s[:, :1]).all()
