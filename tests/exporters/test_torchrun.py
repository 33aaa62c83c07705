from dataclasses import replace

import pytest

from moewright.exporters.torchrun import render_engine_command, torchrun_command
from moewright.spec.errors import BadInput
from sample_run import plan


def spread(world: int, per_node: int):
    base = plan()
    fabric = replace(base.hardware.fabric, devices_per_node=per_node)
    layout = replace(base.layout, world_size=world)
    return replace(base, layout=layout, hardware=replace(base.hardware, fabric=fabric))


def test_one_node_starts_its_ranks_and_the_engine():
    line = render_engine_command(spread(2, 2), job="recipes/quick start.toml", run_dir="runs/q")
    assert line == (
        "torchrun --standalone --nproc-per-node 2 --max-restarts 3 --no-python "
        "moewright train 'recipes/quick start.toml' --out runs/q --supervise"
    )


def test_several_nodes_are_numbered_by_their_environment():
    line = torchrun_command(spread(16, 8))
    assert line.startswith('torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" ')


def test_ranks_that_leave_a_node_half_empty_are_refused():
    with pytest.raises(
        BadInput, match=r"layout\.world_size=12: must fill whole nodes of 8 devices.*: 8"
    ):
        torchrun_command(spread(12, 8))
