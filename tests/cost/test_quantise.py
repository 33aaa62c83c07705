"""Bytes and host time of 8-bit recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.constants import Constants
from moewright.cost.stage_parts import LayerKind
from moewright.cost.symbols import Symbols, build_symbols
from moewright.cost.time.host_time import layer_host_s
from moewright.cost.time.quantise import (
    mixer_operands,
    mlp_operands,
    quantise_bytes,
    weight_quantise_bytes,
)
from moewright.intake import catalogue
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.spec.hardware import Constant, DeviceKind
from moewright.spec.model import MixerKind
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import (
    Dtype,
    FineTuningSpec,
    Routing,
    Task,
    TensorScaling,
    Workload,
)

WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64)
HARDWARE = catalogue.hardware("64xH100")


def symbols(
    workload: Workload, *, model: str = "Qwen/Qwen3-30B-A3B", text: str = "ep8,mbs1"
) -> Symbols:
    return build_symbols(
        Job(
            model=catalogue.model(model),
            workload=workload,
            layout=parse_layout(text, world_size=64),
        ),
        device_kind=DeviceKind.CUDA,
        load=RankLoad(),
        router_efficiency=0.3,
    )


@pytest.mark.parametrize(
    ("precision", "scaling", "forward", "backward"),
    [
        (Dtype.FP8, TensorScaling.DELAYED, 2.0, 4.0),
        (Dtype.FP8, TensorScaling.CURRENT, 6.0, 6.0),
        (Dtype.MXFP8, TensorScaling.CURRENT, 4.0625, 4.0625),
        (Dtype.NVFP4, TensorScaling.CURRENT, 5.125, 5.125),
    ],
)
def test_a_recipe_moves_what_its_passes_read_and_write(
    precision: Dtype, scaling: TensorScaling, forward: float, backward: float
) -> None:
    moved = quantise_bytes(symbols(replace(WORK, precision=precision, tensor_scaling=scaling)))
    assert (moved.forward, moved.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("scaling", "forward", "backward"),
    [(TensorScaling.DELAYED, 1.0, 3.0), (TensorScaling.CURRENT, 5.0, 5.0)],
)
def test_operands_of_frozen_weights_are_written_once(
    scaling: TensorScaling, forward: float, backward: float
) -> None:
    """No gradient of a weight reads an operand the other way round; weights keep both copies."""
    frozen = replace(WORK, precision=Dtype.FP8, tensor_scaling=scaling)
    frozen = replace(frozen, fine_tuning=FineTuningSpec(task=Task.LORA))
    sym = symbols(frozen)
    moved = quantise_bytes(sym)
    assert (moved.forward, moved.backward) == (forward, backward)
    assert weight_quantise_bytes(sym) == backward + 1


def test_operands_are_inputs_and_gradients_of_outputs() -> None:
    """Counted by hand for Qwen3-30B-A3B: 2048 wide, 4096 of queries, 512 of keys."""
    sym = symbols(replace(WORK, precision=Dtype.FP8))
    attention = mixer_operands(sym, MixerKind.ATTENTION, 4096)
    assert attention.inputs == 4096 * (2048 + 4096)
    assert attention.gradients == 4096 * (4096 + 2 * 512 + 2048)
    experts = mlp_operands(sym, outside=10.0, between=3.0)
    assert (experts.inputs, experts.gradients) == (13.0, 16.0)


def aged(years: float) -> Constants:
    age = Sourced(value=years, kind=SourceKind.ASSUMED, source="test")
    constant = Constant(name="stack_age_years", value=age)
    return Constants(replace(HARDWARE, constants=(*HARDWARE.constants, constant)))


def host_s(constants: Constants, sym: Symbols, *, moe: bool = True) -> float:
    return layer_host_s(constants, sym.layout, (), sym, LayerKind(is_moe=moe, is_windowed=False))


def test_old_software_launches_more_for_experts_alone() -> None:
    sym = symbols(WORK)
    assert host_s(aged(2), sym) > 1.2 * host_s(aged(0), sym)
    assert host_s(aged(2), sym, moe=False) == host_s(aged(0), sym, moe=False)


def test_8_bit_experts_cost_launches_each_and_fewer_in_newer_software() -> None:
    narrow = replace(WORK, precision=Dtype.FP8)

    def extra_s(years: float, text: str) -> float:
        constants = aged(years)
        wide_s = host_s(constants, symbols(WORK, text=text))
        return host_s(constants, symbols(narrow, text=text)) - wide_s

    assert extra_s(0, "ep8,mbs1") == pytest.approx(4 * extra_s(0, "ep32,mbs1"))
    assert extra_s(1, "ep8,mbs1") > 1.1 * extra_s(0, "ep8,mbs1")
