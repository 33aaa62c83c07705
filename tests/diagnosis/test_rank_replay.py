"""All ranks replayed together, beside programs of ranks that are simulated with the change."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from moewright.codec import parse_layout
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.rank_replay import RankGraph, can_replay_ranks
from moewright.diagnosis.traces.trace_changes import TraceChange, parse_change
from moewright.spec.errors import BadInput

OPERATIONS = {"gemm": "aten::mm", "other": "aten::silu"}
RANKS = 2


@dataclass(frozen=True)
class Piece:
    """Host work, then an operation, a collective of all, or a message; microseconds."""

    kind: str
    host_us: float
    length_us: float


def draw_program(seed: int) -> list[list[Piece]]:
    """Return the pieces of each rank; collectives and messages stand at the same places."""
    rng = random.Random(seed)
    ranks: list[list[Piece]] = [[] for _ in range(RANKS)]
    for _ in range(rng.randrange(20, 40)):
        kind = rng.choice(("gemm", "gemm", "other", "collective", "message"))
        length_us = rng.uniform(500, 3000)
        for rank in range(RANKS):
            own = rng.uniform(500, 3000) if kind in OPERATIONS else length_us
            if kind == "message":
                own = 800.0
            ranks[rank].append(Piece(kind, rng.uniform(100, 900), own))
    return ranks


def simulate(
    program: list[list[Piece]], change: TraceChange
) -> tuple[list[float], list[list[tuple[Piece, float, float]]]]:
    """Return when each rank ends, and when its pieces began and ended; rank 0 sends to rank 1."""
    clocks = [0.0] * RANKS
    spans: list[list[tuple[Piece, float, float]]] = [[] for _ in range(RANKS)]
    host = change.speeds.get("host", 1.0)
    network = change.speeds.get("network", 1.0)
    for pieces in zip(*program, strict=True):
        begins = [clock + piece.host_us / host for clock, piece in zip(clocks, pieces, strict=True)]
        for rank, piece in enumerate(pieces):
            if piece.kind in OPERATIONS:
                end = begins[rank] + piece.length_us / change.speeds.get(piece.kind, 1.0)
            elif piece.kind == "collective":
                end = max(begins) + piece.length_us / network
            elif rank == 0:
                end = begins[0] + 20 / network
            else:
                end = max(begins[1], begins[0] + piece.length_us / network)
            spans[rank].append((piece, begins[rank], end))
            clocks[rank] = end
    return clocks, spans


def add_event(
    events: list[dict[str, object]],
    process: int,
    name: str,
    begin: float,
    length: float,
    cat: str = "cpu_op",
    **args: object,
) -> None:
    event = {"ph": "X", "cat": cat, "name": name, "pid": process, "tid": 1}
    events.append({**event, "ts": 1e6 + begin, "dur": length, "args": args})


def write_traces(folder: Path, spans: list[list[tuple[Piece, float, float]]]) -> None:
    for rank, pieces in enumerate(spans):
        events: list[dict[str, object]] = []
        add = partial(add_event, events, 1000 * rank)
        for piece, begin, end in pieces:
            if piece.kind in OPERATIONS:
                add(OPERATIONS[piece.kind], begin, end - begin)
                continue
            group = "dp_cp" if piece.kind == "collective" else "pp"
            add(f"wait:{group}", begin, end - begin, "user_annotation")
            if piece.kind == "message":
                call, own = ("send", "gloo:send") if rank == 0 else ("recv_", "gloo:recv")
                inputs = {"Concrete Inputs": ["", "", str(1 - rank), "0"]}
                add(f"c10d::{call}", begin + 1, 5, **inputs)
                add(own, begin + 6, max(0.0, end - begin - 6))
        last = max(end for _, _, end in pieces)
        add("ProfilerStep#1", 0, last + 50, "user_annotation")
        trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


CHANGES = ("gemm=2x", "network=2x", "host=2x", "gemm=3x,network=4x", "other=2x,host=4x")


@pytest.mark.parametrize("seed", range(6))
def test_changed_ranks_end_when_their_program_does(tmp_path: Path, seed: int) -> None:
    program = draw_program(seed)
    ends, spans = simulate(program, TraceChange())
    write_traces(tmp_path, spans)
    captures = read_traces(tmp_path)
    # Of both groups at once: messages are those of a pipeline, collectives those of replicas.
    layout = parse_layout("pp2" if seed % 2 else "", world_size=RANKS)
    kinds = {"collective"} if seed % 2 else {"message"}
    if any(piece.kind in kinds for piece in program[0]):
        program = [
            [piece if piece.kind not in kinds else Piece("other", 1.0, 1.0) for piece in pieces]
            for pieces in program
        ]
        ends, spans = simulate(program, TraceChange())
        write_traces(tmp_path, spans)
        captures = read_traces(tmp_path)
    assert can_replay_ranks(captures, layout)
    graph = RankGraph(captures, layout)
    assert graph.replay(TraceChange(), {}) == pytest.approx(graph.measured_s, rel=1e-6)
    assert graph.measured_s == pytest.approx((max(ends) + 50) / 1e6, rel=1e-6)
    for text in CHANGES:
        change = parse_change(text)
        changed, _ = simulate(program, change)
        assert graph.replay(change, {}) == pytest.approx(max(changed) / 1e6, rel=0.01), text


def test_one_late_rank_is_waited_for(tmp_path: Path) -> None:
    """Halving the work of the rank that others wait for shortens them too."""
    program = [
        [Piece("gemm", 100, 1000), Piece("collective", 100, 300)] * 4,
        [Piece("gemm", 100, 5000), Piece("collective", 100, 300)] * 4,
    ]
    ends, spans = simulate(program, TraceChange())
    write_traces(tmp_path, spans)
    graph = RankGraph(read_traces(tmp_path), parse_layout("", world_size=RANKS))
    assert graph.replay(parse_change("gemm=2x"), {}) == pytest.approx(
        (max(ends) + 50 - 4 * 2500) / 1e6, rel=1e-3
    )


def test_traces_of_some_ranks_are_not_replayed_together(tmp_path: Path) -> None:
    _, spans = simulate(draw_program(1), TraceChange())
    write_traces(tmp_path, spans)
    captures = read_traces(tmp_path)
    assert not can_replay_ranks(captures, parse_layout("", world_size=4))
    assert not can_replay_ranks(captures[:1], parse_layout("", world_size=2))


CALL_US = 2500.0  # of a collective on its link
NOTICE_US = 20.0  # of a wait for what is there already


def draw_calls(seed: int) -> list[list[Piece]]:
    """Return the pieces of each rank: operations, and collectives begun before they are waited for.

    Collectives and gradients stand at the same places; the number of either is its length.
    """
    rng = random.Random(seed)
    ranks: list[list[Piece]] = [[] for _ in range(RANKS)]
    open_calls: list[int] = []
    count = 0
    for _ in range(60):
        kind = rng.choice(("gemm", "gemm", "other", "begin", "wait"))
        number = 0
        if kind == "begin":
            number = count
            open_calls.append(count)
            count += 1
        elif kind == "wait":
            if not open_calls:
                continue
            number = open_calls.pop(rng.randrange(len(open_calls)))
        for pieces in ranks:
            length_us = float(number) if kind in ("begin", "wait") else rng.uniform(300, 3000)
            pieces.append(Piece(kind, rng.uniform(100, 900), length_us))
    for pieces in ranks:
        pieces += [Piece("wait", 100, float(number)) for number in open_calls]
        pieces.append(Piece("gemm", 100, 500))
    return ranks


def draw_reductions(seed: int) -> list[list[Piece]]:
    """Return the pieces of a backward whose buckets fill, and are reduced behind it."""
    rng = random.Random(seed)
    ranks: list[list[Piece]] = [[] for _ in range(RANKS)]
    buckets = rng.randrange(2, 6)
    for bucket in range(buckets):
        for _ in range(rng.randrange(1, 5)):
            for pieces in ranks:
                pieces.append(Piece("gemm", rng.uniform(100, 900), rng.uniform(300, 3000)))
        for pieces in ranks:
            pieces.append(Piece("gradient", 10, bucket))
    for kind in ("begin", "wait"):
        for pieces in ranks:
            pieces += [Piece(kind, 100, bucket) for bucket in range(buckets)]
    return ranks


def simulate_calls(
    program: list[list[Piece]], change: TraceChange
) -> tuple[list[float], list[list[tuple[Piece, float, float]]]]:
    """Return when each rank ends, and its pieces; calls follow each other on one link."""
    clocks = [0.0] * RANKS
    spans: list[list[tuple[Piece, float, float]]] = [[] for _ in range(RANKS)]
    host = change.speeds.get("host", 1.0)
    over_us: dict[float, float] = {}
    ready_us: dict[float, list[float]] = {}
    free_us = 0.0
    for pieces in zip(*program, strict=True):
        begins = [clock + piece.host_us / host for clock, piece in zip(clocks, pieces, strict=True)]
        first = pieces[0]
        if first.kind == "gradient":
            ready_us[first.length_us] = begins
        if first.kind == "begin":
            come = begins
            if change.has_overlap:
                come = ready_us.get(first.length_us, begins)
            free_us = max(free_us, *come) + CALL_US / change.speeds.get("network", 1.0)
            over_us[first.length_us] = free_us
        for rank, piece in enumerate(pieces):
            end = begins[rank]
            if piece.kind in OPERATIONS:
                end += piece.length_us / change.speeds.get(piece.kind, 1.0)
            elif piece.kind == "wait":
                end = max(end + NOTICE_US, over_us[piece.length_us])
            spans[rank].append((piece, begins[rank], end))
            clocks[rank] = end
    return clocks, spans


def write_calls(folder: Path, spans: list[list[tuple[Piece, float, float]]]) -> None:
    has_gradients = any(piece.kind == "gradient" for piece, _, _ in spans[0])
    for rank, pieces in enumerate(spans):
        events: list[dict[str, object]] = []
        add = partial(add_event, events, 1000 * rank)
        for piece, begin, end in pieces:
            number = int(piece.length_us)
            if piece.kind in OPERATIONS:
                add(OPERATIONS[piece.kind], begin, end - begin)
            elif piece.kind == "gradient":
                add(f"gradient:{number}", begin, 0.0, "user_annotation")
            else:
                name = f"{piece.kind}:dp_cp#{number % 64}"
                if has_gradients and piece.kind == "begin":
                    add(f"reduce:{number}", begin - 1, 3, "user_annotation")
                add(name, begin, end - begin, "user_annotation")
        last = max(end for _, _, end in pieces)
        add("ProfilerStep#1", 0, last + 50, "user_annotation")
        trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


@pytest.mark.parametrize("seed", range(8))
def test_collectives_that_begin_before_they_are_waited_for_end_as_their_program_does(
    tmp_path: Path, seed: int
) -> None:
    program = draw_calls(seed)
    ends, spans = simulate_calls(program, TraceChange())
    write_calls(tmp_path, spans)
    graph = RankGraph(read_traces(tmp_path), parse_layout("", world_size=RANKS))
    assert graph.replay(TraceChange(), {}) == pytest.approx(graph.measured_s, rel=1e-6)
    assert graph.measured_s == pytest.approx((max(ends) + 50) / 1e6, rel=1e-6)
    for text in CHANGES:
        change = parse_change(text)
        changed, _ = simulate_calls(program, change)
        assert graph.replay(change, {}) == pytest.approx(max(changed) / 1e6, rel=0.01), text


@pytest.mark.parametrize("seed", range(6))
def test_gradients_reduced_beside_their_backward_begin_when_they_are_there(
    tmp_path: Path, seed: int
) -> None:
    program = draw_reductions(seed)
    _, spans = simulate_calls(program, TraceChange())
    write_calls(tmp_path, spans)
    graph = RankGraph(read_traces(tmp_path), parse_layout("", world_size=RANKS))
    for text in ("overlap=grad", "overlap=grad,network=2x", "overlap=grad,gemm=2x"):
        change = parse_change(text)
        changed, _ = simulate_calls(program, change)
        assert graph.replay(change, {}) == pytest.approx(max(changed) / 1e6, rel=0.01), text


def test_overlap_is_refused_where_gradients_are_not_marked(tmp_path: Path) -> None:
    _, spans = simulate_calls(draw_calls(0), TraceChange())
    write_calls(tmp_path, spans)
    graph = RankGraph(read_traces(tmp_path), parse_layout("", world_size=RANKS))
    with pytest.raises(BadInput, match="do not mark when the gradients"):
        graph.replay(parse_change("overlap=grad"), {})
