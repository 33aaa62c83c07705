"""Time of what a trainer does in its own ways: whole scores, experts one by one or fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moewright.codec import parse_layout
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.stage_parts import LayerKind
from moewright.cost.symbols import Symbols, build_symbols
from moewright.cost.time.elementwise import elementwise_row
from moewright.cost.time.host_time import layer_host_s
from moewright.cost.time.mixers import mixer_core
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.ops import layer_ops
from moewright.intake import catalogue
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.spec.hardware import Constant, Hardware, Op
from moewright.spec.layout import CudaGraphScope
from moewright.spec.plan import TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import (
    AttentionBackend,
    Bf16Products,
    Dtype,
    ExpertKernels,
    Fusion,
    NarrowedProducts,
    Routing,
    TrainerSpec,
    Workload,
)

HARDWARE = catalogue.hardware("64xB200")
MOE = LayerKind(is_moe=True, is_windowed=False)


def symbols(text: str = "ep8", trainer: TrainerSpec | None = None) -> Symbols:
    workload = Workload(
        routing=Routing.BALANCED, seq_len=4096, global_batch=1024, trainer=trainer or TrainerSpec()
    )
    layout = parse_layout(text, world_size=HARDWARE.count)
    job = Job(model=catalogue.model("Qwen3-30B-A3B"), workload=workload, layout=layout)
    return build_symbols(
        job, device_kind=HARDWARE.device.kind, load=RankLoad(), router_efficiency=1.0
    )


def attention_s(sym: Symbols, hardware: Hardware = HARDWARE) -> float:
    rates = DeviceRates(hardware)
    return sum(rates.seconds(row) for pair in mixer_core(sym, 0) for row in pair)


def test_whole_scores_move_their_bytes_and_compute_what_a_mask_hides() -> None:
    whole = symbols(trainer=TrainerSpec(attention_backend=AttentionBackend.UNFUSED))
    (flash,) = mixer_core(symbols(), 0)
    products, softmax = mixer_core(whole, 0)
    assert products[0].amount == 2 * flash[0].amount
    assert products[1].amount == 2 * products[0].amount
    scores = 32 * 4096 * 4096
    assert softmax[0].op is Op.ELEMENTWISE
    assert softmax[0].amount == 2 * 4 * scores  # written, read and written, read; 16 bits each
    assert softmax[1].amount == 2 * 7 * scores
    assert attention_s(whole) > 2 * attention_s(symbols())


def test_kernels_of_an_older_generation_take_longer() -> None:
    older = Constant(
        name="attention_kernel_time_scale",
        value=Sourced(value=3.0, kind=SourceKind.ASSUMED, source="test"),
    )
    hardware = replace(HARDWARE, constants=(*HARDWARE.constants, older))
    assert attention_s(symbols(), hardware) == pytest.approx(3 * attention_s(symbols()))


def slower(name: str, value: float) -> Hardware:
    sourced = Sourced(value=value, kind=SourceKind.ASSUMED, source="test")
    return replace(HARDWARE, constants=(*HARDWARE.constants, Constant(name=name, value=sourced)))


FUSED = TrainerSpec()


def step_parts(
    hardware: Hardware, trainer: TrainerSpec = FUSED, text: str = "ep8,cp2"
) -> dict[TimePart, float]:
    workload = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=1024, trainer=trainer)
    layout = parse_layout(text, world_size=HARDWARE.count)
    prediction = estimate(catalogue.model("Qwen3-30B-A3B"), workload, hardware, layout)
    return {share.part: share.seconds for share in prediction.shares}


def test_a_loop_over_tokens_on_the_host_holds_the_device_up() -> None:
    plain, looped = step_parts(HARDWARE), step_parts(slower("host_s_per_token", 2e-5))
    # 1,024 sequences over 32 data-parallel ranks; a rank of a context group loops over all tokens.
    assert looped[TimePart.HOST] - plain[TimePart.HOST] == pytest.approx(32 * 4096 * 2e-5)
    assert looped[TimePart.HEAD] == plain[TimePart.HEAD]


def test_an_unfused_loss_moves_more_bytes() -> None:
    plain, unfused = step_parts(HARDWARE), step_parts(slower("eager_loss_bytes", 102.0))
    rates = DeviceRates(HARDWARE)
    row = elementwise_row("loss", symbols(), 102.0 * 2048 * 151936, part=TimePart.HEAD)
    assert unfused[TimePart.HEAD] - plain[TimePart.HEAD] == pytest.approx(32 * rates.seconds(row))


def test_rows_summed_by_atomics_take_so_long_an_element() -> None:
    layers, elements = 48, 2048 * 8 * 2048  # tokens of a rank, experts of each, their width
    unfused = TrainerSpec(unfused=(Fusion.PERMUTE,))
    plain, atomic = step_parts(HARDWARE), step_parts(slower("atomic_sum_s", 1.7e-11), unfused)
    more = atomic[TimePart.ELEMENTWISE] - plain[TimePart.ELEMENTWISE]
    assert more == pytest.approx(32 * layers * 2 * elements * 1.7e-11)
    # A library that permutes in its own kernels has none.
    library = "ep8,cp2,dispatcher=hybridep"
    assert step_parts(HARDWARE, unfused, library) == step_parts(HARDWARE, text=library)


def test_gradients_of_biases_add_row_after_row_of_an_expert() -> None:
    trainer = TrainerSpec(unfused=(Fusion.EXPERT_BIAS,))
    layers, rows, row_s = 24, 8192 * 4 * 4 / 32, Constants(HARDWARE)["expert_bias_row_s"]

    def elementwise_s(model: str, trainer: TrainerSpec, text: str) -> float:
        workload = Workload(
            routing=Routing.BALANCED, seq_len=8192, global_batch=HARDWARE.count, trainer=trainer
        )
        layout = parse_layout(text, world_size=HARDWARE.count)
        prediction = estimate(catalogue.model(model), workload, HARDWARE, layout)
        shares = {share.part: share.seconds for share in prediction.shares}
        return shares[TimePart.ELEMENTWISE]

    more = elementwise_s("gpt-oss-20b", trainer, "ep4") - elementwise_s("gpt-oss-20b", FUSED, "ep4")
    assert more == pytest.approx(layers * 2 * rows * row_s)
    # Experts without biases have nothing to sum.
    assert elementwise_s("Qwen3-30B-A3B", trainer, "ep4") == elementwise_s(
        "Qwen3-30B-A3B", FUSED, "ep4"
    )


def host_s(sym: Symbols, graphs: tuple[CudaGraphScope, ...] = ()) -> float:
    return layer_host_s(Constants(HARDWARE), sym.layout, graphs, sym, MOE)


def test_experts_one_by_one_launch_their_products_each() -> None:
    looped = symbols(trainer=TrainerSpec(expert_kernels=ExpertKernels.SEQUENTIAL))
    a_product = Constants(HARDWARE)["host_s_per_expert_product"]
    # 16 experts on a rank, three products each.
    assert host_s(looped) - host_s(symbols()) == pytest.approx(16 * 3 * a_product)


def test_graphs_take_a_layer_whole_where_experts_are_padded() -> None:
    whole = (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER)
    padded = symbols("ep8,capacity=1,capacity_fill=padded")
    assert host_s(padded, whole) == Constants(HARDWARE)["host_s_full_graph"]
    assert host_s(symbols(), whole) > 0
    assert host_s(padded, whole[:1]) > 0


def test_fused_experts_move_less_between_their_products() -> None:
    """The activated rows are written once, as the next product reads them, and never read."""
    grouped = layer_bytes(TrainerSpec())
    fused = layer_bytes(TrainerSpec(expert_kernels=ExpertKernels.FUSED))
    kept = fused["experts.epilogue"]
    spared = grouped["experts.activation"] + grouped["experts.quantise"] - fused["experts.quantise"]
    assert "experts.activation" not in fused
    assert 0 < 3 * kept < spared
    assert fused["permute"] == grouped["permute"]


def layer_bytes(trainer: TrainerSpec) -> dict[str, float]:
    """Return what the forward of a layer with experts moves in MXFP8, by the names of its rows."""
    job = symbols(trainer=trainer).job
    narrow = replace(symbols(trainer=trainer), dtype=Dtype.MXFP8, job=job)
    return {row.name: row.amount for row in layer_ops(narrow, layer=0, moe=True).forward}


@pytest.mark.parametrize("last", [0, 1, 14, 48])
def test_layers_and_products_left_in_16_bits_have_its_rates(last: int) -> None:
    """The step lies between that of no such layer and that of 16 bits, in their proportion."""
    narrow, wide = step_s(0), step_s(48)
    share = last / 48
    assert step_s(last) == pytest.approx((1 - share) * narrow + share * wide, rel=2e-3)
    assert narrow < step_s(0, bf16_products=(Bf16Products.ATTENTION,)) < wide
    assert step_s(0, narrowed=(NarrowedProducts.HEAD,)) < narrow


def step_s(last: int, **parts: Any) -> float:
    trainer = TrainerSpec(bf16_last_layers=last, **parts)
    workload = Workload(
        routing=Routing.BALANCED,
        seq_len=4096,
        global_batch=1024,
        precision=Dtype.NVFP4,
        trainer=trainer,
    )
    layout = parse_layout("ep8,graphs=full,dispatcher=hybridep", world_size=HARDWARE.count)
    return estimate(catalogue.model("Qwen3-30B-A3B"), workload, HARDWARE, layout).step_s


def test_linears_of_layers_in_16_bits_keep_wide_inputs() -> None:
    workload = Workload(seq_len=4096, global_batch=1024, precision=Dtype.MXFP8)
    model = catalogue.model("Qwen3-30B-A3B")
    layout = parse_layout("ep8", world_size=HARDWARE.count)
    peaks = [
        estimate(
            model, replace(workload, trainer=TrainerSpec(bf16_first_layers=n)), HARDWARE, layout
        ).peak_bytes
        for n in (0, 2, 4)
    ]
    assert peaks[0] < peaks[1] < peaks[2]
