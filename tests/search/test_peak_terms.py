"""The terms of a peak and of a step stand in lists: a new one reaches estimates and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.memory import peak, peak_terms
from moewright.cost.memory.estimate_memory import expected_symbols, split_by_rank
from moewright.cost.memory.model_states import stage_bucket_sets
from moewright.cost.memory.peak_terms import (
    OPTIMIZER_TERMS,
    RESIDENT_TERMS,
    SEARCHED_FIELDS,
    PeakTerm,
    book_terms,
)
from moewright.cost.memory.rank_batch import EVERY_MODULE, Booked, RankBatch, StageRank
from moewright.cost.stage_parts import count_parts, list_parts
from moewright.cost.symbols import Symbols
from moewright.cost.time import step_tail
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.step_tail import TailContext, TailSeconds
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.rules.timetable import stages
from moewright.search import screening_memory
from moewright.search.screening import Screener
from moewright.search.space import build_search_space, degree_groups
from moewright.spec.hardware import Hardware
from moewright.spec.layout import CpComm, DispatcherKind, Offload, Overlap
from moewright.spec.ledger import Component, Module, StepPhase
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.workload import (
    CheckpointSpec,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    MatrixUpdate,
    OptimizerSpec,
    SaveMode,
    TensorScaling,
    Workload,
)

MORE_BYTES = 3 * 2**30
WORK = Workload(seq_len=4096, global_batch=64)


@dataclass(frozen=True, kw_only=True)
class ScoredLayout:
    """A layout's bytes and seconds as a search scores it, and its estimate."""

    score_bytes: float
    score_s: float
    estimate: Estimate


def _score_and_estimate() -> ScoredLayout:
    """Score and estimate a layout."""
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    space = build_search_space(model, WORK, hardware, "tp2,cp1,pp2,vpp1,ep8,etp1,mbs1,zero1")
    screener = Screener(space)
    (group,) = degree_groups(space)
    bounded = next(iter(screener.bound(group)))
    scores = screener.score(bounded, room_bytes=np.inf, below_s=np.inf)
    assert scores is not None
    place = tuple(np.argwhere(np.isfinite(scores.step_s))[0].tolist())
    layout = screener.layout(scores, *place)
    return ScoredLayout(
        score_bytes=float(scores.peak_bytes[place]),
        score_s=float(scores.step_s[place]),
        estimate=estimate(model, WORK, hardware, layout),
    )


def _book_more(ranks: RankBatch, _: Booked) -> Booked:
    more = ranks.by_degree(lambda sym: MORE_BYTES * sym.layout.ep // 8)
    return {Component.BUFFERS: ranks.book(more, Module.OTHER)}


def _add_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    more = PeakTerm(book=_book_more, fields=("ep",))
    for module in (peak, screening_memory):
        monkeypatch.setattr(module, "RESIDENT_TERMS", (*RESIDENT_TERMS, more))


def _add_live(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = peak.LIVE_TERMS[0]
    more = replace(kept, nbytes=lambda memory: memory.saved, component=Component.BUFFERS)
    monkeypatch.setattr(peak, "LIVE_TERMS", (*peak.LIVE_TERMS, more))


def _add_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold_more(sym: Symbols) -> int:
        return MORE_BYTES * sym.layout.mbs

    monkeypatch.setattr(peak, "BACKWARD_TERMS", (*peak.BACKWARD_TERMS, hold_more))


@pytest.mark.parametrize("add", [_add_resident, _add_live, _add_backward])
def test_a_new_term_moves_estimates_and_scores_alike(
    add: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _score_and_estimate()
    add(monkeypatch)
    after = _score_and_estimate()
    more = after.estimate.peak_bytes - before.estimate.peak_bytes
    assert more > MORE_BYTES / 8
    assert after.score_bytes - before.score_bytes == pytest.approx(more, abs=64)


def _stage_rank(job: Job, hardware: Hardware) -> StageRank:
    constants = DeviceRates(hardware).constants
    parts = list_parts(job.model, job.layout, job.workload.trainer)
    chunks = stages.pipeline_chunks(job.model, job.layout)
    counts = count_parts(job.model, job.layout, parts, chunks)
    return StageRank(
        constants=constants,
        sym=expected_symbols(job, hardware, constants),
        columns=EVERY_MODULE,
        pp_rank=0,
        sets=stage_bucket_sets(job)[0],
        parts=parts,
        counts=split_by_rank(job.layout, chunks, counts)[0],
    )


def _wait_once(_: TailContext) -> TailSeconds:
    return TailSeconds(phase=StepPhase.OPTIMIZER, part=TimePart.HOST, exposed_s=2.0)


def test_a_new_term_of_a_step_moves_estimates_and_scores_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _score_and_estimate()
    monkeypatch.setattr(step_tail, "TAIL_TERMS", (*step_tail.TAIL_TERMS, _wait_once))
    after = _score_and_estimate()
    assert after.score_s - before.score_s == pytest.approx(2.0, rel=1e-9)
    assert after.estimate.step_s - before.estimate.step_s == pytest.approx(2.0, rel=1e-9)
    shares = {share.part: share.seconds for share in after.estimate.shares}
    assert shares[TimePart.HOST] >= 2.0


OTHER_VALUES: dict[str, object] = {
    "tp": 2,
    "cp": 2,
    "ep": 4,
    "etp": 2,
    "mbs": 2,
    "zero": 3,
    "offload": (Offload.OPTIMIZER,),
    "dispatcher": DispatcherKind.ALL_GATHER,
    "cp_comm": CpComm.ALL_GATHER,
    "overlap": (Overlap.EP, Overlap.WGRAD),
}
WORKLOADS = {
    "plain": WORK,
    "frozen": replace(
        WORK, fine_tuning=FineTuningSpec(freeze=(FrozenPart.EXPERTS, FrozenPart.EMBEDDINGS))
    ),
    "delayed": replace(WORK, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED),
    "narrow gradients": replace(
        WORK,
        grad_dtype=Dtype.BF16,
        optimizer=OptimizerSpec(matrix_update=MatrixUpdate.MUON),
        checkpoint=replace(CheckpointSpec(), mode=SaveMode.ASYNC),
    ),
}


@pytest.mark.parametrize("work", WORKLOADS)
def test_a_term_depends_on_no_field_that_it_does_not_name(work: str) -> None:
    """A search works a term out once for all layouts that are equal in the fields it names."""
    assert set(OTHER_VALUES) == set(SEARCHED_FIELDS)
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("32xH100")
    moved = set()
    for text in ("ep8,pp2,spare=2", "tp4,cp2,ep8,pp2,zero2", "tp4,ep2,pp2,zero3"):
        layout = parse_layout(text, world_size=32)
        terms = (*RESIDENT_TERMS, *OPTIMIZER_TERMS)
        before = _booked(Job(model=model, workload=WORKLOADS[work], layout=layout), hardware, terms)
        for field, value in OTHER_VALUES.items():
            other = replace(layout, **{field: value})
            after = _booked(
                Job(model=model, workload=WORKLOADS[work], layout=other), hardware, terms
            )
            for term in terms:
                if field not in term.fields:
                    assert before[term.book.__name__] == after[term.book.__name__], (field, term)
                elif before[term.book.__name__] != after[term.book.__name__]:
                    moved.add(term.book.__name__)
    assert {"model_states", "fixed_buffers"} <= moved


def _booked(
    job: Job, hardware: Hardware, terms: tuple[PeakTerm, ...]
) -> dict[str, dict[Component, list[float]]]:
    booked = book_terms(_stage_rank(job, hardware), terms)
    return {
        term.book.__name__: {
            component: nbytes[0].tolist() for component, nbytes in more.items() if nbytes.any()
        }
        for term, more in zip(terms, booked, strict=True)
    }


def test_a_term_names_fields_that_a_search_varies() -> None:
    for term in (*RESIDENT_TERMS, *OPTIMIZER_TERMS):
        assert set(term.fields) <= set(peak_terms.SEARCHED_FIELDS)
