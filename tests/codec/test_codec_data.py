"""Records to and from plain data, and refusals that name the place of a fault."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.codec import FloatPolicy, fingerprint, from_data, to_data
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective, Curve
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import CommRow, Ledger, Selection
from moewright.spec.model import MoeSpec
from moewright.spec.names import closest_match
from moewright.spec.run import StepRecord
from moewright.spec.units import SourceKind
from moewright.spec.workload import Dtype, OptimizerSpec, Workload

lines = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")))
numbers = st.floats(allow_nan=False, allow_infinity=False)
workloads = st.builds(
    Workload,
    seq_len=st.integers(1, 2**40),
    global_batch=st.integers(1, 2**40),
    precision=st.sampled_from(Dtype),
    load_factor=numbers,
    optimizer=st.builds(OptimizerSpec, lr=numbers, clip_norm=st.just(0.0)),
)
counts = st.integers(-(2**62), 2**62)
curves = st.builds(
    Curve,
    points=st.lists(st.tuples(numbers, numbers)).map(tuple),
    kind=st.sampled_from(SourceKind),
    source=lines,
)
rows = st.builds(CommRow, op=st.sampled_from(Collective), group=lines, bytes=counts, calls=counts)
selections = st.builds(Selection, step=counts, counts=st.lists(st.just((((1, 2),),))).map(tuple))


@given(st.one_of(workloads, curves, rows, selections))
def test_data_reads_back_to_the_same_record(record: object) -> None:
    text = json.dumps(to_data(record))
    assert from_data(type(record), json.loads(text), where="") == record


def test_tuples_are_lists_and_enums_their_values() -> None:
    assert to_data(Ledger(rank=1, pp_rank=0, notes=("a",)))["notes"] == ["a"]
    assert to_data(Layout(world_size=2, recompute=(Recompute.MOE,)))["recompute"] == ["moe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    moe: MoeSpec | None
    flag: bool = False
    pairs: tuple[tuple[str, int], ...] = ()


ROUTER = {"top_k": 2, "score": "softmax"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"moe": {"experts": 8, "ffn_size": 4, "ruoter": ROUTER}},
            "job: moe.ruoter: unknown key; nearest legal value: router",
        ),
        ({"moe": {"experts": 8, "ffn_size": 4}}, "job: moe.router: is missing"),
        (
            {"moe": {"experts": True, "ffn_size": 4, "router": ROUTER}},
            "job: moe.experts=true: must be a whole number",
        ),
        ({"moe": {"experts": 8.5, "ffn_size": 4, "router": ROUTER}}, "nearest legal value: 8"),
        (
            {"moe": {"experts": "8", "ffn_size": 4, "router": ROUTER}},
            'moe.experts="8": must be a whole number',
        ),
        (
            {"moe": {"experts": 10**400, "ffn_size": 4, "router": ROUTER}},
            "moe.experts=a huge integer",
        ),
        (
            {"moe": {"experts": 8, "ffn_size": 4, "router": {**ROUTER, "score": "softmx"}}},
            'moe.router.score="softmx": must be one of softmax, sigmoid, sqrtsoftplus, '
            "sparse_mixer; "
            "nearest legal value: softmax",
        ),
        (
            {
                "moe": {
                    "experts": 8,
                    "ffn_size": 4,
                    "router": {**ROUTER, "scaling_factor": math.nan},
                }
            },
            "moe.router.scaling_factor=nan: must be a finite number",
        ),
        (
            {"moe": {"experts": 8, "ffn_size": 4, "router": {**ROUTER, "score": []}}},
            "must be one of",
        ),
        ({"moe": []}, "moe=a list of 0: must be a table"),
        ({"moe": None, "flag": 1}, "flag=1: must be true or false"),
        ({"moe": None, "pairs": "ab"}, 'pairs="ab": must be a list'),
        ({"moe": None, "pairs": [["a", 1], ["b"]]}, "pairs[1]=a list of 1: must be a list of 2"),
        ({"moe": None, "pairs": [["a", 1], [2, 2]]}, "pairs[1][0]=2: must be text"),
        ({"moe": None, "zzz": 1}, "known here: moe, flag, pairs"),
        ({"moe": None, 3: 1}, "job: 3: unknown key"),
        ([], "job=a list of 0: must be a table"),
        (None, "must be a table"),
    ],
)
def test_faults_are_located(data: object, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        from_data(_Holder, data, where="job")
    assert message in str(refusal.value)


def test_every_fault_is_reported_unknown_keys_first() -> None:
    with pytest.raises(BadInput) as refusal:
        from_data(Workload, {"seqlen": 8, "global_batch": "x"}, where="job.toml: workload")
    assert [reason.field for reason in refusal.value.reasons] == [
        "job.toml: workload.seqlen",
        "job.toml: workload.seq_len",
        "job.toml: workload.global_batch",
    ]
    assert refusal.value.reasons[0].nearest == "seq_len"


def test_a_whole_number_does_for_a_float() -> None:
    spec = from_data(OptimizerSpec, {"lr": 1}, where="")
    assert spec.lr == 1.0
    assert isinstance(spec.lr, float)


def test_endless_nesting_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadInput):
        from_data(_Holder, {"moe": None, "pairs": deep}, where="x")


def test_measured_numbers_may_be_infinite() -> None:
    step = StepRecord(
        step=1,
        loss=math.inf,
        aux_loss=0.0,
        lr=0.0,
        grad_norm=math.inf,
        tokens=1,
        step_s=1.0,
        tokens_per_s_per_rank=1.0,
        tflops_per_rank=0.0,
        mfu=0.0,
        skipped=True,
        phases=(),
        loads=(),
    )
    assert from_data(StepRecord, to_data(step), where="", floats=FloatPolicy.NON_FINITE) == step
    with pytest.raises(BadInput):
        from_data(StepRecord, to_data(step), where="")


def test_fingerprint_tells_records_apart() -> None:
    plain = Layout(world_size=2)
    folded = Layout(world_size=2, ep=2)
    assert fingerprint(plain) == fingerprint(Layout(world_size=2))
    different = ((plain,), (folded,), (plain, folded), (folded, plain))
    assert len({fingerprint(*records) for records in different}) == 4
    assert len(fingerprint(plain)) == 16
    int(fingerprint(plain), 16)


def test_nearest() -> None:
    assert closest_match("QWEN3-30b-a3b", ["Qwen3-30B-A3B", "Mixtral-8x7B"]) == "Qwen3-30B-A3B"
    assert closest_match("zzz", ["tp", "ep"]) == ""
