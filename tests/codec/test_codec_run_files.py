"""Run folders: they read back, and torn, repeated and damaged lines are told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moewright.codec import fingerprint, format_record, read_run, write_incidents, write_json
from moewright.spec.errors import BadInput, Paragraph
from moewright.spec.hardware import Device, DeviceKind, Fabric, Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec
from moewright.spec.plan import Estimate, Plan, Verdict
from moewright.spec.run import EvalRecord, Incident, IncidentKind, Session, StepRecord
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Workload

ONE = Sourced(value=1.0, kind=SourceKind.ASSUMED, source="a test")
PLAN = Plan(
    model=ModelSpec(
        name="m",
        family="",
        hidden_size=8,
        layers=1,
        vocab_size=16,
        dense_ffn_size=8,
        moe=None,
        moe_layers=(False,),
        attention=AttentionSpec(
            kind=AttentionKind.GQA, heads=2, kv_heads=1, head_dim=4, v_head_dim=4
        ),
    ),
    workload=Workload(seq_len=8, global_batch=2),
    hardware=Hardware(
        name="h",
        count=1,
        device=Device(
            name="d", kind=DeviceKind.CPU, memory_bytes=ONE, memory_Bps=ONE, peaks=(), rates=()
        ),
        fabric=Fabric(
            domain_size=1,
            devices_per_node=1,
            domain_Bps=ONE,
            network_Bps=ONE,
            domain_latency_s=ONE,
            network_latency_s=ONE,
        ),
    ),
    layout=Layout(world_size=1),
    estimate=Estimate(
        ledgers=(),
        peak_rank=0,
        peak_bytes=1,
        capacity_bytes=2,
        verdict=Verdict.FITS,
        margin_bytes=1,
        peak_sd_bytes=1,
        step_sd=0.1,
        largest="",
        step_s=1.0,
        shares=(),
        micro_batches=2,
        bubble_fraction=0.0,
        tokens_per_s_per_device=1.0,
        model_flops_per_step=1.0,
        tflops_per_device=1.0,
        mfu=0.5,
        hfu=0.5,
        assumptions=(),
    ),
    fingerprint="0" * 16,
)
PLAN = replace(PLAN, fingerprint=fingerprint(PLAN.model, PLAN.workload, PLAN.hardware, PLAN.layout))
STEP = StepRecord(
    step=1,
    loss=2.0,
    aux_loss=0.0,
    lr=0.1,
    grad_norm=1.0,
    tokens=16,
    step_s=1.0,
    tokens_per_s_per_rank=16.0,
    tflops_per_rank=0.0,
    mfu=0.0,
    skipped=False,
    phases=(),
    loads=(),
)
EVAL = EvalRecord(step=2, heldout_loss=1.5, unigram_entropy=2.0, tokens=16)


def _session(first_step: int) -> Session:
    return Session(
        first_step=first_step,
        started="2026-01-01T00:00:00Z",
        world_size=1,
        torch_version="2.13.0",
        device_name="cpu",
        threads_per_rank=1,
    )


def _write(directory: Path, steps: str) -> None:
    write_json(directory / "plan.json", PLAN)
    (directory / "steps.jsonl").write_text(steps)


def test_a_run_reads_back(tmp_path: Path) -> None:
    diverged = replace(STEP, step=2, loss=math.inf, skipped=True)
    _write(tmp_path, "".join(map(format_record, (_session(1), STEP, diverged, EVAL))))
    ledgers = [Ledger(rank=rank, pp_rank=0, notes=(f"rank {rank}",)) for rank in (0, 1)]
    for ledger in ledgers:
        write_json(tmp_path / "ledger" / f"rank{ledger.rank:05d}.json", ledger)
    selection = Selection(step=2, counts=((((1, 2),),),))
    write_json(tmp_path / "ledger" / "selection.json", selection)
    record = read_run(tmp_path)
    assert record.plan == PLAN
    assert record.sessions == (_session(1),)
    assert record.steps == (STEP, diverged)
    assert record.evals == (EVAL,)
    assert record.ledgers == tuple(ledgers)
    assert record.selection == selection
    assert record.notes == ()


def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path) -> None:
    _write(
        tmp_path,
        format_record(_session(1))
        + format_record(STEP)
        + format_record(replace(STEP, step=2))[:37],
    )
    record = read_run(tmp_path)
    assert record.steps == (STEP,)
    assert record.notes == ("steps.jsonl: a torn last line (37 characters) was left out",)
    assert record.selection is None
    assert record.ledgers == ()


def test_repeated_steps_are_superseded(tmp_path: Path) -> None:
    lost = [replace(STEP, step=step, loss=9.0) for step in (1, 2, 3, 4)]
    redone = replace(STEP, step=3, loss=1.0)
    records = [
        _session(1),
        *lost,
        replace(EVAL, step=2),
        replace(EVAL, step=4),
        _session(3),
        redone,
    ]
    _write(tmp_path, "".join(map(format_record, records)))
    record = read_run(tmp_path)
    assert record.steps == (*lost[:2], redone)
    assert [entry.step for entry in record.evals] == [2]
    assert len(record.sessions) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "steps.jsonl:2: kind=None: must be one of"),
        ('{"kind": "stepp"}', "must be one of session, step, eval"),
        ('{"kind": "eval", "step": 1}', "steps.jsonl:2: heldout_loss: is missing"),
        ("torn{", "steps.jsonl:2: is not JSON"),
        ("[]", "must be one of"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    _write(tmp_path, format_record(_session(1)) + line + "\n" + format_record(STEP))
    with pytest.raises(BadInput) as refusal:
        read_run(tmp_path)
    assert message in str(refusal.value)


def test_a_folder_without_a_run_is_refused_with_the_run_that_is_near(tmp_path: Path) -> None:
    """Files with names like those of a run are of something else."""
    (tmp_path / "plans.json").write_text("{}")
    run = tmp_path / "runs/quickstart"
    run.mkdir(parents=True)
    for path, rule in (
        (tmp_path, "is no run folder, which has plan.json and steps.jsonl: neither is here"),
        (tmp_path / "nowhere", "no such run folder"),
        (tmp_path / "plans.json", "is a file, not a run folder"),
        (tmp_path / "runs/quikstart", "no such run folder"),
    ):
        with pytest.raises(BadInput, match=rule) as refusal:
            read_run(path)
        assert refusal.value.reasons[0].nearest == ""
    _write(run, format_record(STEP))
    for path in (tmp_path, tmp_path / "runs", tmp_path / "runs/quikstart"):
        with pytest.raises(BadInput, match="run folder") as refusal:
            read_run(path)
        assert refusal.value.reasons[0].nearest == str(run)
    (run / "plan.json").unlink()
    with pytest.raises(BadInput, match="the first is missing"):
        read_run(run)


def test_the_plan_of_a_run_stands_for_its_folder(tmp_path: Path) -> None:
    _write(tmp_path, format_record(STEP))
    assert read_run(tmp_path / "plan.json") == read_run(tmp_path)


def test_an_edited_plan_is_noted(tmp_path: Path) -> None:
    _write(tmp_path, format_record(STEP))
    assert read_run(tmp_path).notes == ()
    write_json(tmp_path / "plan.json", replace(PLAN, layout=Layout(world_size=1, mbs=2)))
    assert read_run(tmp_path).notes == (
        "plan.json does not hold its own fingerprint: edited, or of another version of moewright",
    )


@pytest.mark.parametrize(
    "name", ["incidents.jsonl", "paces.json", "ledger/rank00000.json", "ledger/selection.json"]
)
@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"{\n", b'{"layout": "", "paces": [3]}\n', b""])
def test_a_damaged_file_beside_the_steps_hides_none_of_them(
    content: bytes, name: str, tmp_path: Path
) -> None:
    _write(tmp_path, format_record(_session(1)) + format_record(STEP))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    record = read_run(tmp_path)
    assert record.steps == (STEP,)
    is_no_journal = name == "incidents.jsonl" and not content  # nothing has happened
    assert [name in note for note in record.notes] == [True] * (not is_no_journal)
    assert (record.incidents, record.paces, record.ledgers, record.selection) == ((), (), (), None)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b'{"kind": "\\ud800"}'])
def test_a_damaged_line_of_the_journal_hides_no_other(content: bytes, tmp_path: Path) -> None:
    _write(tmp_path, format_record(_session(1)) + format_record(STEP))
    first, second = (
        Incident(
            kind=IncidentKind.CRASH,
            time="2026-11-27T04:00:00+00:00",
            unix_s=1.0,
            message=Paragraph(f"rank {rank} died"),
            layout="ep2",
            world_size=2,
        )
        for rank in (0, 1)
    )
    write_incidents(tmp_path, (first, second))
    path = tmp_path / "incidents.jsonl"
    one, other = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([one, content, other, b"torn"]))
    record = read_run(tmp_path)
    assert record.incidents == (first, second)
    (note,) = record.notes
    assert "incidents.jsonl:2" in note
