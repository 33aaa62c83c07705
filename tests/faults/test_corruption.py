"""Bits that flip in the state of one rank: found before the next update, and the rank named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.codec import read_incidents
from moewright.engine.checkpoint import CheckpointSaver, LocalShard
from moewright.engine.model.layers import list_parameters
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.pipeline.executor import ChunkResult
from moewright.engine.run.bit_hash import hash_bits
from moewright.engine.run.corruption import (
    StateGuard,
    find_culprits,
    find_odd_replicas,
    find_wrong_ranks,
)
from moewright.engine.run.neighbour_pass import find_other_name, is_handed_on
from moewright.engine.run.supervise import Elasticity, _Supervisor
from moewright.engine.run.train import train
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode, FailureKind, RankFailure
from moewright.spec.run import IncidentKind
from moewright.spec.workload import DataSpec, SaveMode

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.arange(24.0).view(4, 6).to(dtype)
    before = hash_bits(tensor)
    bits = tensor.view(torch.uint8).view(-1)
    for index in range(0, bits.numel(), 5):
        for bit in range(8):
            bits[index] ^= 1 << bit
            assert hash_bits(tensor) != before
            bits[index] ^= 1 << bit
    assert hash_bits(tensor) == before


def test_what_a_sum_does_not_see_changes_the_hash() -> None:
    """Elements and whole blocks that change places, and flips that cancel, of the sign bit too."""
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(200_000, generator=generator)
    seen = {int(hash_bits(tensor))}
    for draw in range(200):
        first, second = torch.randperm(len(tensor), generator=generator)[:2].tolist()
        changed = tensor.clone()
        words = changed.view(torch.int32)
        if draw % 3 == 0:
            changed[[first, second]] = tensor[[second, first]]
        elif draw % 3 == 1:
            words[[first, second]] ^= -(1 << 31)  # both signs
        else:
            words[first] += 1 << (draw % 23)
            words[second] -= 1 << (draw % 23)
        seen.add(int(hash_bits(changed)))
    seen.add(int(hash_bits(tensor.roll(1 << 16))))
    seen.add(int(hash_bits(tensor.sort().values)))
    assert len(seen) == 203


def test_the_replica_unlike_most_is_named_and_both_of_two() -> None:
    alike = {"a (0, 0)": 5, "b (0, 0)": 7}
    assert find_odd_replicas([alike, alike, alike]) == {}
    assert find_odd_replicas([alike, alike | {"b (0, 0)": 8}, alike]) == {1: "weight b"}
    assert find_odd_replicas([{"a (0, 0)": 5}, {"a (0, 0)": 6}]) == {0: "weight a", 1: "weight a"}
    assert find_odd_replicas([{"a (0, 0)": 5}, {"a (2, 0)": 6}]) == {}


def test_a_third_rank_tells_which_of_two_is_wrong() -> None:
    assert find_wrong_ranks(["", "", "", ""], []) == {}
    # Rank 1 is wrong: in its own work, which two others repeat, and in that of rank 0.
    assert find_wrong_ranks(["a", "b", "", ""], ["", "b", "", "c"]) == {1: "a"}
    assert find_wrong_ranks(["", "b", "", ""], ["", "b", "", ""]) == {1: "b"}
    assert find_wrong_ranks(["a", "", "", ""], ["", "", "", ""]) == {1: "a"}
    assert find_wrong_ranks(["a", "b", ""], ["", "b", "c"]) == {1: "a"}
    assert find_wrong_ranks(["a", "b"], []) == {0: "a", 1: "a"}


def test_what_is_noted_is_compared_by_its_name() -> None:
    noted = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]
    assert find_other_name(noted, [("b", 2), ("a", 1), ("c", 4), ("a", 3)]) == ""
    assert find_other_name(noted, [("b", 2), ("a", 3), ("c", 4), ("a", 1)]) == "a"
    assert find_other_name(noted, [("b", 5), ("a", 1), ("c", 6), ("a", 3)]) == "b"
    assert find_other_name(noted, noted[:3]) == "c"
    assert find_other_name(noted[:3], noted) == "c"


def test_a_chunk_without_layers_makes_no_gradient_of_its_own() -> None:
    """fully_shard makes a view of what it hands on, which has a gradient on one rank of two."""
    hidden = torch.ones(2, requires_grad=True)
    loss = torch.ones(())
    assert is_handed_on(hidden, ChunkResult(hidden=hidden, loss=None))
    assert is_handed_on(hidden, ChunkResult(hidden=hidden.view_as(hidden), loss=None))
    assert not is_handed_on(hidden, ChunkResult(hidden=hidden, loss=loss))
    assert not is_handed_on(hidden, ChunkResult(hidden=hidden * 1, loss=None))
    assert not is_handed_on(hidden, ChunkResult(hidden=None, loss=loss))


@pytest.mark.parametrize("world_size", [3, 4, 5, 6])
def test_a_rank_that_is_named_alone_is_wrong(world_size: int) -> None:
    """Of any set of wrong ranks, which err each in its own way or some of them alike."""
    for errors in product((0, 1, 2), repeat=world_size):
        by_next, by_third = (
            ["" if errors[rank] == errors[(rank + far) % world_size] else "a" for rank in ranks]
            for far, ranks in ((1, range(world_size)), (2, range(world_size)))
        )
        culprits = find_wrong_ranks(by_next, by_third)
        wrong = {rank for rank, error in enumerate(errors) if error}
        if len(wrong) == 1:
            assert set(culprits) == wrong
        if 0 < len(wrong) < world_size and len(culprits) == 1 and 2 * len(wrong) < world_size:
            assert set(culprits) <= wrong, errors


def _list_parts(state: TrainState, part: str) -> torch.Tensor:
    """Return a flat tensor of a part of a rank's state."""
    holder = state.optimizer.buckets[0]
    if part == "weight":
        return holder.weights
    segment = holder.segments[0]
    return segment.master if part == "master" else segment.exp_avg_sq.tensors[0]


def _flip(state: TrainState, part: str) -> None:
    _list_parts(state, part).view(torch.int32)[3] ^= 1 << 7


def _swap(state: TrainState, part: str) -> None:
    tensor = _list_parts(state, part)
    assert tensor[3] != tensor[8]
    tensor[[3, 8]] = tensor[[8, 3]]


def _cancel(state: TrainState, part: str) -> None:
    words = _list_parts(state, part).view(torch.int32)
    words[3] += 1 << 7
    words[8] -= 1 << 7


def _multiply_wrongly(state: TrainState, part: str) -> None:
    """Let every product of this rank have a wrong element from now on, whoever asks for it."""
    multiply = torch.mm

    def multiply_wrongly(a: torch.Tensor, b: torch.Tensor, *, out: Any = None) -> torch.Tensor:
        product = multiply(a, b, out=out)
        if product.numel():
            product.view(-1)[0] += 1e-3
        return product

    torch.mm = multiply_wrongly


def _add_wrongly(state: TrainState, part: str) -> None:
    """Let one gradient of this rank be wrong each time."""
    weight = list_parameters(state.model)[-1].parameter
    weight.register_hook(lambda gradient: gradient * 1.001)


def _update_wrongly(state: TrainState, part: str) -> None:
    """Let every update of this rank have a wrong element, whosever it is."""
    update = state.optimizer._update_rule

    def update_wrongly(states: Any, grads: Any, owned: Any, *rest: Any, **options: Any) -> None:
        update(states, grads, owned, *rest, **options)
        for piece in owned[:1]:
            states.master[piece.start] += 1e-3

    state.optimizer._update_rule = update_wrongly


def _update_wrongly_once(state: TrainState, part: str) -> None:
    """Let the update in place have a wrong element, and none of those beforehand."""
    update = state.optimizer.update

    def update_wrongly(**options: float) -> None:
        update(**options)
        state.optimizer.buckets[0].segments[0].master[5] += 1e-3

    state.optimizer.update = update_wrongly  # type: ignore[method-assign]


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_rank_that_is_named_twice_is_put_aside_where_it_is_certain(
    is_certain: bool, data: DataSpec, tmp_path: Path
) -> None:
    """The second time it is another step: checks are not in each one."""
    workload = tiny_jobs.build_workload(data)
    plan = tiny_jobs.build_plan(workload, "mbs1", world_size=4)
    smaller = tiny_jobs.build_plan(workload, "mbs1", world_size=2)
    elasticity = Elasticity(replan={2: smaller}.get, min_ranks=2)
    supervisor = _Supervisor(plan, tmp_path, elasticity)
    failure = RankFailure(
        rank=1,
        step=15,
        time_s=0.0,
        kind=FailureKind.CAUSE,
        event="failed",
        cause=IncidentKind.CORRUPTION,
        is_certain=is_certain,
    )
    assert supervisor.prepare_restart(failure)
    assert supervisor.slots == (0, 1, 2, 3)
    assert supervisor.prepare_restart(replace(failure, step=12))
    assert supervisor.slots == ((0, 2) if is_certain else (0, 1, 2, 3))


Attack = Callable[[TrainState, str], None]
# What is done to rank 1 before its step 3, to what, in which layout, and what is said of it.
_ATTACKS = [
    (_flip, "weight", "dp4,mbs1", "weight .* by no update"),
    (_flip, "master", "ep2,mbs1", "by no update"),
    (_flip, "moment", "dp2,mbs1,zero1", "optim/exp_avg_sq/.* by no update"),
    (_swap, "weight", "tp2,mbs1", "weight .* by no update"),
    (_swap, "master", "dp2,mbs1", "by no update"),
    (_cancel, "weight", "dp2,mbs1", "weight .* by no update"),
    (_cancel, "master", "pp2,mbs1,layout='Et*2|tL'", "by no update"),
    (_update_wrongly, "", "dp4,mbs1,zero1", "the update of .* comes out otherwise on other ranks"),
    (_update_wrongly_once, "", "dp2,mbs1,zero1", "the update of .* not what it was beforehand"),
    (_multiply_wrongly, "", "tp2,pp2,mbs1,layout='Et*2|tL'", "comes out otherwise on other ranks"),
    (_multiply_wrongly, "", "dp4,ep4,mbs1", "comes out otherwise on other ranks"),
    (_multiply_wrongly, "", "cp2,dp2,mbs1", "comes out otherwise on other ranks"),
    (
        _add_wrongly,
        "",
        "dp4,mbs1,overlap=grad",
        "gradient of .* comes out otherwise on other ranks",
    ),
    (_add_wrongly, "", "pp4,mbs1,layout='E|t*2|t|L'", "gradient of .* on other ranks"),
    (_multiply_wrongly, "", "tp2,dp2,mbs1,zero2", "comes out otherwise on other ranks"),
    (_multiply_wrongly, "", "dp4,ep2,mbs1,zero3", "comes out otherwise on other ranks"),
    (_multiply_wrongly, "", "pp2,dp2,vpp2,mbs1,layout='Et|t||tL',zero3", "on other ranks"),
    (_multiply_wrongly, "", "pp2,dp2,vpp2,mbs1,layout='Et|t|t|L',zero2", "on other ranks"),
]
# Those that `make test` tries.
_CHEAP = (3, 6, 8, 9)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if number in _CHEAP else pytest.mark.thorough)
        for number, case in enumerate(_ATTACKS)
    ],
)
def test_an_attack_on_one_rank_is_found_and_the_rank_named(
    case: tuple[Attack, str, str, str],
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    attack, part, layout, message = case
    begin = StateGuard.begin_step
    begun = {"steps": 0}

    def attack_and_begin(self: StateGuard) -> None:
        begun["steps"] += 1
        if begun["steps"] == 3 and self._rank == 1:
            attack(self._state, part)
        begin(self)

    monkeypatch.setattr(StateGuard, "begin_step", attack_and_begin)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    degrees = dict(re.findall("(dp|tp|pp|cp)([0-9])", layout))
    world_size = prod(map(int, degrees.values())) if degrees else 2
    plan = tiny_jobs.build_plan(workload, layout, world_size=world_size)
    assert train(plan, tmp_path) is ExitCode.RANK_FAILED
    line = capfd.readouterr().err.splitlines()[0]
    assert re.match(f"rank 1 failed at step 3: CorruptionError: .*{message}", line), line
    (incident,) = read_incidents(tmp_path)
    assert (incident.kind, incident.rank) == (IncidentKind.CORRUPTION, 1)


def test_the_rank_whose_own_figures_differ_is_named_before_those_that_share_sums() -> None:
    reduced = "the reduced gradient of a (0)"
    assert find_culprits(["", ""]) == {}
    assert find_culprits([reduced, "the loss"]) == {1: "the loss"}
    assert find_culprits([reduced, ""]) == {0: reduced}


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,mbs1,overlap=grad",
        pytest.param("dp2,mbs1,zero1", marks=pytest.mark.thorough),
        pytest.param("pp2,mbs1,layout='Et*2|tL'", marks=pytest.mark.thorough),
    ],
)
def test_a_flipped_bit_of_a_gradient_is_found(
    layout: str,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 loses a bit of a gradient of step 3, while it is added up."""
    begin = DistributedOptimizer.begin_step
    begun = {"steps": 0}

    def begin_and_flip(self: DistributedOptimizer, micro_batches: int) -> None:
        begin(self, micro_batches)
        begun["steps"] += 1
        if begun["steps"] == 3 and self._runtime.mesh.rank == 1:
            weight = list_parameters(models[-1])[0].parameter
            weight.register_hook(flip_bit)

    def flip_bit(gradient: torch.Tensor) -> torch.Tensor:
        if begun["steps"] != 3:
            return gradient
        flipped = gradient.clone()
        flipped.view(-1).view(torch.int32)[3] ^= 1 << 7
        return flipped

    monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_and_flip)
    original = DistributedOptimizer.__init__
    models: list[torch.nn.Module] = []

    def remember_model(self: DistributedOptimizer, runtime: Any, model: Any, *rest: Any) -> None:
        models.append(model)
        original(self, runtime, model, *rest)

    monkeypatch.setattr(DistributedOptimizer, "__init__", remember_model)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    assert train(tiny_jobs.build_plan(workload, layout, world_size=2), tmp_path) == 3
    message = capfd.readouterr().err.splitlines()[0]
    assert "of step 3 came out otherwise when repeated" in message
    assert re.match("rank 1 failed at step 3: CorruptionError: the gradient of ", message)


@pytest.mark.turns
@pytest.mark.parametrize(
    "layout",
    [
        "tp2,mbs1",
        pytest.param("ep2,mbs1,overlap=grad+param", marks=pytest.mark.thorough),
        pytest.param("pp2,mbs1,layout='Et*2|tL'", marks=pytest.mark.thorough),
        pytest.param("dp2,mbs1,zero3", marks=pytest.mark.thorough),
    ],
)
def test_checks_find_nothing_in_a_sound_run_and_change_nothing(
    layout: str, data: DataSpec, tmp_path: Path
) -> None:
    curves = []
    for every in (0, 1):
        workload = tiny_jobs.build_workload(data, steps=3, check_every=every, eval_batches=1)
        folder = tmp_path / str(every)
        plan = tiny_jobs.build_plan(workload, layout, world_size=2)
        assert train(plan, folder) is ExitCode.DONE
        rows = tiny_jobs.read_steps(folder)
        curves.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "mbs1,zero0"),
        (4, "mbs1,overlap=grad+param"),
        (4, "ep4,mbs1,recompute=full"),
        (4, "tp2,ep4,mbs2"),
        (4, "tp2,etp2,ep2,dispatcher=allgather"),
        (4, "tp2,cp2,ep4,mbs2,cp_comm=a2a"),
        (2, "cp2,mbs2,overlap=grad"),
        (4, "pp2,ep2,mbs1,layout='Et*2|tL',recompute=core_attn"),
        (2, "pp2,mbs2,schedule=zbv,layout='E|t|t|tL'"),
        (2, "pp2,mbs1,schedule=zb-h1,layout='Et*2|tL'"),
        (4, "tp2,pp2,vpp2,mbs2,layout='Et|t||tL'"),
        (2, "mbs1,zero3"),
        (4, "pp2,vpp2,mbs1,layout='Et|t||tL',zero3"),
        (4, "pp2,vpp2,ep2,mbs1,layout='Et|t|t|L',zero2"),
        (4, "tp2,ep2,mbs1,zero2"),
    ],
)
def test_a_hundred_healthy_windows_give_no_alarm(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    workload = tiny_jobs.build_workload(data, steps=102, check_every=1, eval_batches=1)
    plan = tiny_jobs.build_plan(workload, layout, world_size=world_size)
    assert train(plan, tmp_path) is ExitCode.DONE
    assert len(tiny_jobs.read_steps(tmp_path)) == 102


@pytest.mark.parametrize(
    "mode", [SaveMode.SYNC, pytest.param(SaveMode.ASYNC, marks=pytest.mark.thorough)]
)
def test_a_bit_that_flips_before_a_save_is_not_committed(
    mode: SaveMode, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 loses a bit between the notes after step 2 and the checkpoint of step 2."""
    save = CheckpointSaver.save

    def flip_and_save(
        self: CheckpointSaver, step: int, shards: list[LocalShard], **options: Any
    ) -> Path:
        if self._comm.rank == 1:
            shards[-1].tensor.view(-1).view(torch.int32)[0] ^= 1 << 7
        return save(self, step, shards, **options)

    monkeypatch.setattr(CheckpointSaver, "save", flip_and_save)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    checkpoint = replace(workload.checkpoint, every_steps=2, mode=mode)
    plan = tiny_jobs.build_plan(replace(workload, checkpoint=checkpoint), "ep2,mbs1", world_size=2)
    assert train(plan, tmp_path) is ExitCode.RANK_FAILED
    (incident,) = read_incidents(tmp_path)
    assert (incident.kind, incident.rank, incident.step) == (IncidentKind.CORRUPTION, 1, 2)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
