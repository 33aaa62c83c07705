"""Routes of a run, recorded and taken again in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_jobs
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, RoutesSpec
from selection import thorough
from tiny_jobs import read_state, read_steps

pytestmark = pytest.mark.spawn
STEPS = 2
EXPERTS = 8


def build_plan(data: DataSpec, layout: str, world_size: int, **folders: Path) -> Plan:
    routes = RoutesSpec(**{f"{key}_routes": str(path) for key, path in folders.items()})
    workload = tiny_jobs.build_workload(data, steps=STEPS, routes=routes)
    checkpoint = replace(workload.checkpoint, every_steps=STEPS)
    return tiny_jobs.build_plan(
        replace(workload, checkpoint=checkpoint), layout, world_size=world_size
    )


@pytest.fixture(scope="module")
def recorded(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process and record its routes."""
    folder = tmp_path_factory.mktemp("routes")
    assert train(build_plan(data, "", 1, record=folder / "routes"), folder / "run") is ExitCode.DONE
    return folder


def shift_routes(source: Path, target: Path) -> None:
    """Copy routes, every token sent to the neighbours of the experts that it took."""
    target.mkdir()
    for path in source.iterdir():
        content = path.read_bytes()
        if path.suffix == ".bin":
            content = (np.frombuffer(content, "u1") % EXPERTS + 1).astype("u1").tobytes()
        (target / path.name).write_bytes(content)


def test_routes_are_of_every_token_and_replay_to_the_same_bits(
    recorded: Path, data: DataSpec, tmp_path: Path
) -> None:
    paths = sorted((recorded / "routes").glob("*.bin"))
    assert [path.name for path in paths] == ["layer00000.bin", "layer00002.bin"]
    for path in paths:
        routes = np.frombuffer(path.read_bytes(), "u1").reshape(STEPS * 8, 32, 2)
        assert routes.min() == 1
        assert routes.max() == EXPERTS
        assert (routes[..., 0] != routes[..., 1]).all()
    again = build_plan(data, "", 1, replay=recorded / "routes", record=tmp_path / "routes")
    assert train(again, tmp_path / "run") is ExitCode.DONE
    expected, actual = read_state(recorded / "run", STEPS), read_state(tmp_path / "run", STEPS)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    for path in paths:
        assert (tmp_path / "routes" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "tp2,ep2,recompute=full"),
        thorough(2, "pp2,layout='Et|ttL'"),
        thorough(4, "cp2,ep4,recompute=moe"),
        thorough(4, "tp2,ep2,zero3"),
    ],
)
def test_routes_are_taken_in_another_layout(
    world_size: int, layout: str, recorded: Path, data: DataSpec, tmp_path: Path
) -> None:
    """Other routes than the routers choose make another run, the same in any layout."""
    shift_routes(recorded / "routes", tmp_path / "shifted")
    for name, plan in (
        ("one", build_plan(data, "", 1, replay=tmp_path / "shifted")),
        (
            "cut",
            build_plan(
                data, layout, world_size, replay=tmp_path / "shifted", record=tmp_path / "taken"
            ),
        ),
    ):
        assert train(plan, tmp_path / name) is ExitCode.DONE
    for path in (tmp_path / "shifted").glob("*.bin"):
        assert (tmp_path / "taken" / path.name).read_bytes() == path.read_bytes()
    own, one, cut = (
        [step["loss"] for step in read_steps(folder)]
        for folder in (recorded / "run", tmp_path / "one", tmp_path / "cut")
    )
    assert cut == pytest.approx(one, rel=1e-5)
    assert abs(one[0] - own[0]) > 1e-3 * own[0]


def test_routes_of_another_job_are_refused(recorded: Path, data: DataSpec, tmp_path: Path) -> None:
    plan = build_plan(data, "", 1, replay=recorded / "routes")
    other = replace(plan, workload=replace(plan.workload, seed=7))
    with pytest.raises(BadInput, match="routes are of another job, which has seed=7"):
        train(other, tmp_path / "run")
    dense = replace(plan, model=tiny_jobs.DENSE)
    with pytest.raises(BadInput, match="the model has no experts"):
        train(dense, tmp_path / "run")
    with pytest.raises(BadInput, match="holds no routes"):
        train(build_plan(data, "", 1, replay=tmp_path / "nothing"), tmp_path / "run")
    captured = build_plan(data, "graphs=full", 1, replay=recorded / "routes")
    with pytest.raises(BadInput) as caught:
        train(captured, tmp_path / "run")
    assert "train.replay_routes" in [reason.field for reason in caught.value.reasons]
    assert not (tmp_path / "run").exists()
