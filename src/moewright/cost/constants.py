"""The named constants of the time and memory models: what a hardware file says, else the default of
its kind."""

from __future__ import annotations

from moewright.spec.hardware import Constant, DeviceKind, Hardware
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import GIB
from moewright.spec.workload import Dtype

TIME_FINDINGS = "fit of 96 published MoE rows, centre of the neutral priors"
TIME_FIT = "fit of 115 published rows on six parts"
MEMORY_FINDINGS = "published allocated/reserved pairs and NCCL reports"

# What only offload depends on.
OFFLOAD_CONSTANTS = ("host_link_Bps", "host_link_efficiency", "host_optimizer_s_per_parameter")
NVFP4_CONSTANTS = ("gemm_4bit_time_scale", "nvfp4_weight_copies_bytes", "nvfp4_input_bytes")
_FOUR_BIT = (
    "NVFP4 beside FP8; nine rows of dense Llama 3 on GB300, one model from the other 9-12 % off"
)
_OFFLOADED_OPTIMIZER = "Megatron-Bridge guide to CPU offload: Qwen3-30B-A3B on 16 H100, 0.996 s a step, 4.189 s with every state offloaded"


def _constant(name: str, value: float, kind: SourceKind, source: str) -> Constant:
    return Constant(name=name, value=Sourced(value=value, kind=kind, source=source))


def _fitted(sd: float, what: str = "") -> str:
    """Source of a constant fitted by tune.fit, with the standard deviation of its logarithm."""
    return f"{what + '; ' if what else ''}{TIME_FIT}, +-{100 * sd:.0f} %"


_CUDA = (
    _constant("gemm_time_scale", 0.854, SourceKind.FITTED, _fitted(0.12)),
    _constant("gemm_8bit_time_scale", 1.09, SourceKind.FITTED, _fitted(0.07)),
    _constant("gemm_mx_time_scale", 1.1, SourceKind.FITTED, _fitted(0.04, "MXFP8 beside FP8")),
    _constant("gemm_4bit_time_scale", 0.61, SourceKind.FITTED, _FOUR_BIT),
    _constant(
        "grouped_gemm_time_scale",
        0.945,
        SourceKind.FITTED,
        _fitted(0.14, "beside that of other GEMMs"),
    ),
    _constant(
        "biased_expert_time_scale",
        3.21,
        SourceKind.FITTED,
        _fitted(0.14, "experts with biases (gpt-oss)"),
    ),
    _constant(
        "weight_traffic_time_scale",
        0.706,
        SourceKind.FITTED,
        _fitted(0.29, "expert weights and their sums, the rest under products"),
    ),
    _constant("attention_time_scale", 0.864, SourceKind.FITTED, _fitted(0.07)),
    _constant("attention_backward_time_scale", 0.864, SourceKind.FITTED, _fitted(0.07)),
    _constant("elementwise_time_scale", 1.4, SourceKind.FITTED, _fitted(0.10)),
    _constant("optimizer_time_scale", 1.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant("alltoall_inside_time_scale", 0.859, SourceKind.FITTED, _fitted(0.14)),
    _constant("alltoall_between_time_scale", 1.11, SourceKind.FITTED, _fitted(0.15)),
    _constant(
        "gemm_efficiency",
        0.74,
        SourceKind.ASSUMED,
        "middle of published bf16 GEMM tables, 0.67-0.78 of peak",
    ),
    _constant("grouped_rolloff_rows", 60.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant(
        "narrow_head_time_scale",
        1.43,
        SourceKind.MEASURED,
        "AIConfigurator 0.11.0 attention tables: heads of 64 reach 0.78 (Hopper) and 0.64 (Blackwell) of heads of 128",
    ),
    _constant(
        "attention_efficiency",
        0.62,
        SourceKind.ASSUMED,
        "published attention tables, long sequences",
    ),
    _constant(
        "attention_half_seq",
        1600.0,
        SourceKind.ASSUMED,
        "published attention tables: half the rate at this length",
    ),
    _constant(
        "attention_backward_efficiency",
        0.632,
        SourceKind.ASSUMED,
        "2.5 x the forward FLOPs at 0.79 of its rate",
    ),
    _constant("router_efficiency", 0.3, SourceKind.FITTED, TIME_FINDINGS),
    _constant("memory_efficiency", 0.8, SourceKind.FITTED, TIME_FINDINGS),
    _constant(
        "domain_efficiency",
        0.7,
        SourceKind.FITTED,
        "NCCL all-to-all bus bandwidth over nominal, H800",
    ),
    _constant("tp_time_scale", 0.656, SourceKind.FITTED, _fitted(0.22)),
    _constant("tp_overlap_hidden", 0.555, SourceKind.FITTED, _fitted(0.29, "under its GEMMs")),
    _constant("dedup_inside_time_scale", 0.675, SourceKind.FITTED, _fitted(0.13)),
    _constant("dedup_between_time_scale", 1.11, SourceKind.FITTED, _fitted(0.17)),
    _constant(
        "tp_efficiency", 0.75, SourceKind.FITTED, "of the NCCL bus bandwidth; " + TIME_FINDINGS
    ),
    _constant(
        "network_efficiency", 0.9, SourceKind.FITTED, "45 of 50 GB/s a NIC; " + TIME_FINDINGS
    ),
    _constant(
        "dedup_domain_efficiency",
        0.58,
        SourceKind.FITTED,
        "DeepEP inside one node, 260 of 450 GB/s",
    ),
    _constant("host_s_per_layer_microbatch", 0.00382, SourceKind.FITTED, _fitted(0.17, "eager")),
    _constant(
        "host_per_year",
        1.33,
        SourceKind.FITTED,
        _fitted(0.09, "host work grows so much a year of age"),
    ),
    _constant("stack_age_years", 0.0, SourceKind.ASSUMED, "software of mid-2026"),
    _constant(
        "host_graphed_attention", 0.236, SourceKind.FITTED, _fitted(0.25, "share its graph saves")
    ),
    _constant(
        "host_graphed_router", 0.351, SourceKind.FITTED, _fitted(0.18, "share its graph saves")
    ),
    _constant("host_s_full_graph", 0.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant("host_exponent", 1.57, SourceKind.FITTED, _fitted(0.12)),
    _constant(
        "host_exponent_synced",
        1.33,
        SourceKind.FITTED,
        _fitted(0.11, "1F1B waits for every transfer"),
    ),
    _constant(
        "host_dense_layer_share",
        0.5,
        SourceKind.ASSUMED,
        "a dense layer launches about half as much",
    ),
    _constant(
        "host_s_per_local_expert",
        2e-5,
        SourceKind.ASSUMED,
        "launches that grow with the local experts",
    ),
    _constant("host_s_per_recompute_module", 1e-4, SourceKind.ASSUMED, TIME_FINDINGS),
    _constant("ep_overlap_hidden", 0.819, SourceKind.FITTED, _fitted(0.06)),
    _constant(
        "tp_host", 1.25, SourceKind.FITTED, _fitted(0.08, "its collectives are launched too")
    ),
    _constant(
        "dp_overlap_host", 1.14, SourceKind.FITTED, _fitted(0.09, "hooks of sums and gathers")
    ),
    _constant("ep_overlap_host", 1.34, SourceKind.FITTED, _fitted(0.10)),
    _constant(
        "sync_s_alltoall",
        0.000495,
        SourceKind.FITTED,
        _fitted(0.32, "a wait for split sizes a direction"),
    ),
    _constant("sync_s_fused", 1e-4, SourceKind.FITTED, "DeepEP and HybridEP; " + TIME_FINDINGS),
    _constant(
        "optimizer_bytes_per_parameter",
        60.0,
        SourceKind.FITTED,
        "1.5 x the 40 bytes of a fused step",
    ),
    _constant(
        "step_time_sd",
        0.07,
        SourceKind.MEASURED,
        "median 4.8 % on (model, device) pairs left out of the fit",
    ),
    _constant("step_tail_s", 0.02, SourceKind.FITTED, TIME_FINDINGS),
    _constant("overlapped_dp_share", 0.273, SourceKind.FITTED, _fitted(0.20)),
    _constant("host_link_Bps", 64e9, SourceKind.DATASHEET, "PCIe Gen5 x16, one direction"),
    _constant("host_link_efficiency", 0.8, SourceKind.ASSUMED, "pinned copies reach 50 of 64 GB/s"),
    _constant("host_optimizer_s_per_parameter", 1.68e-9, SourceKind.MEASURED, _OFFLOADED_OPTIMIZER),
    _constant(
        "reserved_share", 0.045, SourceKind.MEASURED, "21 layouts, 2.5-9.3 %; " + MEMORY_FINDINGS
    ),
    _constant("reserved_share_sd", 0.018, SourceKind.MEASURED, MEMORY_FINDINGS),
    _constant("context_bytes", 0.55 * GIB, SourceKind.ASSUMED, "CUDA context and libraries"),
    _constant(
        "communicator_bytes",
        0.45 * GIB,
        SourceKind.ASSUMED,
        "one a group; NCCL issue 964 says 0.5-0.7",
    ),
    _constant("communicator_bytes_sd", 0.2 * GIB, SourceKind.ASSUMED, MEMORY_FINDINGS),
    _constant("workspace_bytes", 1e8, SourceKind.ASSUMED, "library workspaces"),
    _constant(
        "stack_bytes",
        0.0,
        SourceKind.ASSUMED,
        "what a software stack holds beside all of this; fitted a stack",
    ),
    _constant(
        "logit_bytes",
        6.0,
        SourceKind.ASSUMED,
        "bf16 logits and their fp32 softmax; 2 when fused in place",
    ),
    _constant(
        "fp8_weight_copies_bytes",
        2.0,
        SourceKind.FITTED,
        "row- and column-wise; 11 FP8-Flow pairs, median 1.6",
    ),
    _constant(
        "fp8_input_bytes", 1.0, SourceKind.ASSUMED, "8-bit linears keep their quantised input"
    ),
    _constant(
        "nvfp4_weight_copies_bytes",
        1.125,
        SourceKind.ASSUMED,
        "row- and column-wise, 4 + 8/16 bits an element",
    ),
    _constant(
        "nvfp4_input_bytes",
        0.5625,
        SourceKind.ASSUMED,
        "4-bit linears keep their input in 4 + 8/16 bits",
    ),
)

_CPU = (
    _constant("gemm_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("gemm_8bit_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("gemm_mx_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("biased_expert_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("grouped_gemm_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("weight_traffic_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("attention_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant(
        "attention_backward_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"
    ),
    _constant("elementwise_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("optimizer_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant(
        "alltoall_inside_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"
    ),
    _constant(
        "alltoall_between_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"
    ),
    _constant(
        "gemm_efficiency",
        0.8,
        SourceKind.ASSUMED,
        "no rate in the hardware file: share of its peak",
    ),
    _constant("grouped_rolloff_rows", 60.0, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant("narrow_head_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant(
        "attention_efficiency",
        0.3,
        SourceKind.ASSUMED,
        "no rate in the hardware file: share of its peak",
    ),
    _constant("attention_half_seq", 0.0, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant(
        "attention_backward_efficiency", 0.8, SourceKind.ASSUMED, "no rate in the hardware file"
    ),
    _constant("router_efficiency", 1.0, SourceKind.ASSUMED, "an fp32 GEMM has its own rate"),
    _constant(
        "memory_efficiency",
        0.5,
        SourceKind.ASSUMED,
        "no rate in the hardware file: share of memory bandwidth",
    ),
    _constant("domain_efficiency", 0.5, SourceKind.ASSUMED, "gloo over shared memory or loop-back"),
    _constant("tp_efficiency", 1.0, SourceKind.ASSUMED, "as other collectives"),
    _constant("tp_time_scale", 1.0, SourceKind.ASSUMED, "as other collectives"),
    _constant(
        "tp_overlap_hidden", 0.0, SourceKind.ASSUMED, "collectives and products share the cores"
    ),
    _constant(
        "ep_overlap_hidden", 0.0, SourceKind.ASSUMED, "collectives and products share the cores"
    ),
    _constant("tp_host", 1.0, SourceKind.ASSUMED, "collectives have their own time"),
    _constant("dp_overlap_host", 1.0, SourceKind.ASSUMED, "one thread launches and computes"),
    _constant(
        "ep_overlap_host", 1.0, SourceKind.ASSUMED, "collectives and products share the cores"
    ),
    _constant(
        "host_per_year",
        1.0,
        SourceKind.ASSUMED,
        "the engine that runs is the one that was measured",
    ),
    _constant(
        "stack_age_years",
        0.0,
        SourceKind.ASSUMED,
        "the engine that runs is the one that was measured",
    ),
    _constant("host_graphed_attention", 0.0, SourceKind.ASSUMED, "no graphs on a CPU"),
    _constant("host_graphed_router", 0.0, SourceKind.ASSUMED, "no graphs on a CPU"),
    _constant("dedup_inside_time_scale", 1.0, SourceKind.ASSUMED, "as other collectives"),
    _constant("dedup_between_time_scale", 1.0, SourceKind.ASSUMED, "as other collectives"),
    _constant("network_efficiency", 0.5, SourceKind.ASSUMED, "gloo over TCP"),
    _constant("dedup_domain_efficiency", 0.5, SourceKind.ASSUMED, "as other collectives"),
    _constant(
        "host_s_per_layer_microbatch",
        4e-3,
        SourceKind.ASSUMED,
        "no measurement in the hardware file",
    ),
    _constant(
        "host_s_per_local_expert", 1e-4, SourceKind.ASSUMED, "no measurement in the hardware file"
    ),
    _constant(
        "host_exponent", 1.0, SourceKind.ASSUMED, "one thread launches and computes: times add"
    ),
    _constant(
        "host_exponent_synced",
        1.0,
        SourceKind.ASSUMED,
        "one thread launches and computes: times add",
    ),
    _constant(
        "host_dense_layer_share",
        0.5,
        SourceKind.ASSUMED,
        "a dense layer launches about half as much",
    ),
    _constant("host_s_per_recompute_module", 1e-4, SourceKind.ASSUMED, "a few launches"),
    _constant(
        "sync_s_alltoall",
        2e-3,
        SourceKind.FITTED,
        "ranks wait for each other: step less CPU time, 2 ranks",
    ),
    _constant(
        "sync_s_fused", 2e-3, SourceKind.ASSUMED, "no such dispatcher on a CPU: as all-to-all"
    ),
    _constant("host_s_full_graph", 0.0, SourceKind.ASSUMED, "no graphs on a CPU"),
    _constant(
        "overlapped_dp_share", 1.0, SourceKind.ASSUMED, "collectives and products share the cores"
    ),
    _constant(
        "optimizer_bytes_per_parameter", 30.0, SourceKind.ASSUMED, "no rate in the hardware file"
    ),
    _constant(
        "step_time_sd",
        0.35,
        SourceKind.MEASURED,
        "two ranks: 178 ms predicted, 283 taken; 250, 350; 73, 87",
    ),
    _constant("step_tail_s", 0.0, SourceKind.ASSUMED, "nothing launched on the side"),
    _constant("host_link_Bps", 1e12, SourceKind.ASSUMED, "host and device are one memory"),
    _constant("host_link_efficiency", 1.0, SourceKind.ASSUMED, "host and device are one memory"),
    _constant(
        "host_optimizer_s_per_parameter", 0.0, SourceKind.ASSUMED, "host and device are one memory"
    ),
    _constant(
        "reserved_share", 0.0, SourceKind.ASSUMED, "what the engine frees it keeps for itself"
    ),
    _constant("reserved_share_sd", 0.03, SourceKind.ASSUMED, "spread of unmodelled temporaries"),
    _constant("context_bytes", 0.0, SourceKind.ASSUMED, "the interpreter is not counted"),
    _constant(
        "communicator_bytes", 0.0, SourceKind.ASSUMED, "gloo keeps no staging buffers to speak of"
    ),
    _constant("communicator_bytes_sd", 0.0, SourceKind.ASSUMED, "as above"),
    _constant("workspace_bytes", 0.0, SourceKind.ASSUMED, "library workspaces are small"),
    _constant("stack_bytes", 0.0, SourceKind.ASSUMED, "as above"),
    _constant("logit_bytes", 6.0, SourceKind.ASSUMED, "of fused stacks only"),
    _constant("fp8_weight_copies_bytes", 0.0, SourceKind.ASSUMED, "no 8-bit compute on CPUs"),
    _constant("fp8_input_bytes", 2.0, SourceKind.ASSUMED, "no 8-bit compute on CPUs"),
    _constant("gemm_4bit_time_scale", 1.0, SourceKind.ASSUMED, "no 4-bit compute on CPUs"),
    _constant("nvfp4_weight_copies_bytes", 0.0, SourceKind.ASSUMED, "no 4-bit compute on CPUs"),
    _constant("nvfp4_input_bytes", 2.0, SourceKind.ASSUMED, "no 4-bit compute on CPUs"),
)


class Constants:
    """Constants of one hardware: the file's own win over the defaults. Reading a name nobody
    defines is a KeyError."""

    __slots__ = ("_all", "_values")

    def __init__(self, hardware: Hardware) -> None:
        defaults = _CUDA if hardware.device.kind is DeviceKind.CUDA else _CPU
        self._all = {c.name: c for c in (*defaults, *hardware.constants)}
        self._values = {name: c.value.value for name, c in self._all.items()}

    def __getitem__(self, name: str) -> float:
        value: float = self._values[name]
        return value

    def low_precision_bytes(self, what: str, dtype: Dtype) -> float:
        """Bytes an element of "weight_copies" or of the "input" that linear layers of a narrow
        dtype keep."""
        return self[f"{'nvfp4' if dtype is Dtype.NVFP4 else 'fp8'}_{what}_bytes"]

    def list_all(self) -> tuple[Constant, ...]:
        """All constants, by name."""
        return tuple(self._all[name] for name in sorted(self._all))
