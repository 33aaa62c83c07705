"""The named constants of the time and memory models: what a hardware file says, else the default of its kind."""

from __future__ import annotations

from moewright.spec.hardware import Constant, DeviceKind, Hardware
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import GIB

TIME_FINDINGS = "fit of 96 published MoE rows, centre of the neutral priors"
# Where a hardware file gives no host time, it is a number of operations times the time of one.
_HOST_OPS = (
    ("host_s_per_layer_microbatch", "host_ops_per_layer_microbatch"),
    ("host_s_per_local_expert", "host_ops_per_local_expert"),
)
MEMORY_FINDINGS = "published allocated/reserved pairs and NCCL reports"


def _constant(name: str, value: float, kind: SourceKind, source: str) -> Constant:
    return Constant(name=name, value=Sourced(value=value, kind=kind, source=source))


_CUDA = (
    _constant("gemm_time_scale", 0.79, SourceKind.FITTED, "Hopper bf16; " + TIME_FINDINGS),
    _constant("grouped_gemm_time_scale", 0.88, SourceKind.FITTED, "Hopper bf16; " + TIME_FINDINGS),
    _constant("attention_time_scale", 0.95, SourceKind.FITTED, TIME_FINDINGS),
    _constant("attention_backward_time_scale", 0.95, SourceKind.FITTED, TIME_FINDINGS),
    _constant("elementwise_time_scale", 1.4, SourceKind.FITTED, TIME_FINDINGS),
    _constant("optimizer_time_scale", 1.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant("alltoall_inside_time_scale", 0.79, SourceKind.FITTED, TIME_FINDINGS),
    _constant("alltoall_between_time_scale", 1.13, SourceKind.FITTED, TIME_FINDINGS),
    _constant("gemm_efficiency", 0.74, SourceKind.ASSUMED, "middle of published bf16 GEMM tables, 0.67-0.78 of peak"),
    _constant("grouped_rolloff_rows", 60.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant("attention_efficiency", 0.62, SourceKind.ASSUMED, "published attention tables, long sequences"),
    _constant(
        "attention_half_seq", 1600.0, SourceKind.ASSUMED, "published attention tables: half the rate at this length"
    ),
    _constant(
        "attention_backward_efficiency", 0.632, SourceKind.ASSUMED, "2.5 x the forward FLOPs at 0.79 of its rate"
    ),
    _constant("router_efficiency", 0.3, SourceKind.FITTED, TIME_FINDINGS),
    _constant("memory_efficiency", 0.8, SourceKind.FITTED, TIME_FINDINGS),
    _constant("domain_efficiency", 0.7, SourceKind.FITTED, "NCCL all-to-all bus bandwidth over nominal, H800"),
    _constant("tp_efficiency", 0.75, SourceKind.FITTED, "of the NCCL bus bandwidth; " + TIME_FINDINGS),
    _constant("network_efficiency", 0.9, SourceKind.FITTED, "45 of 50 GB/s a NIC; " + TIME_FINDINGS),
    _constant("dedup_domain_efficiency", 0.58, SourceKind.FITTED, "DeepEP inside one node, 260 of 450 GB/s"),
    _constant("host_s_per_layer_microbatch", 6.5e-3, SourceKind.FITTED, "eager, with exponent 1.5; " + TIME_FINDINGS),
    _constant("host_s_layer_graphs", 3.2e-3, SourceKind.FITTED, TIME_FINDINGS),
    _constant("host_s_full_graph", 0.0, SourceKind.FITTED, TIME_FINDINGS),
    _constant("host_exponent", 1.5, SourceKind.FITTED, TIME_FINDINGS),
    _constant("host_dense_layer_share", 0.5, SourceKind.ASSUMED, "a dense layer launches about half as much"),
    _constant("host_s_per_local_expert", 2e-5, SourceKind.ASSUMED, "launches that grow with the local experts"),
    _constant("host_s_per_recompute_module", 1e-4, SourceKind.ASSUMED, TIME_FINDINGS),
    _constant("ep_overlap_hidden", 0.68, SourceKind.FITTED, TIME_FINDINGS),
    _constant("ep_overlap_host", 1.26, SourceKind.FITTED, TIME_FINDINGS),
    _constant("sync_s_alltoall", 9e-4, SourceKind.FITTED, "one wait for split sizes a direction; " + TIME_FINDINGS),
    _constant("sync_s_fused", 1e-4, SourceKind.FITTED, "DeepEP and HybridEP; " + TIME_FINDINGS),
    _constant("optimizer_bytes_per_parameter", 60.0, SourceKind.FITTED, "1.5 x the 40 bytes of a fused step"),
    _constant("step_tail_s", 0.02, SourceKind.FITTED, TIME_FINDINGS),
    _constant("overlapped_dp_share", 0.25, SourceKind.FITTED, "gradient reduce and gather under compute"),
    _constant("reserved_share", 0.045, SourceKind.MEASURED, "21 layouts, 2.5-9.3 %; " + MEMORY_FINDINGS),
    _constant("reserved_share_sd", 0.018, SourceKind.MEASURED, MEMORY_FINDINGS),
    _constant("context_bytes", 0.55 * GIB, SourceKind.ASSUMED, "CUDA context and libraries"),
    _constant("communicator_bytes", 0.45 * GIB, SourceKind.ASSUMED, "one a group; NCCL issue 964 says 0.5-0.7"),
    _constant("communicator_bytes_sd", 0.2 * GIB, SourceKind.ASSUMED, MEMORY_FINDINGS),
    _constant("workspace_bytes", 1e8, SourceKind.ASSUMED, "library workspaces"),
    _constant("stack_bytes", 0.0, SourceKind.ASSUMED, "what a software stack holds beside all of this; fitted a stack"),
    _constant("logit_bytes", 6.0, SourceKind.ASSUMED, "bf16 logits and their fp32 softmax; 2 when fused in place"),
    _constant("fp8_weight_copies_bytes", 2.0, SourceKind.FITTED, "row- and column-wise; 11 FP8-Flow pairs, median 1.6"),
    _constant("fp8_input_bytes", 2.0, SourceKind.FITTED, "kept input of an 8-bit linear; FP8-Flow pairs save nothing"),
)

_CPU = (
    _constant("gemm_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("grouped_gemm_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("attention_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("attention_backward_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("elementwise_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("optimizer_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("alltoall_inside_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("alltoall_between_time_scale", 1.0, SourceKind.ASSUMED, "rates are this machine's own"),
    _constant("gemm_efficiency", 0.8, SourceKind.ASSUMED, "no rate in the hardware file: share of its peak"),
    _constant("grouped_rolloff_rows", 60.0, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant("attention_efficiency", 0.3, SourceKind.ASSUMED, "no rate in the hardware file: share of its peak"),
    _constant("attention_half_seq", 0.0, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant("attention_backward_efficiency", 0.8, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant("router_efficiency", 1.0, SourceKind.ASSUMED, "an fp32 GEMM has its own rate"),
    _constant("memory_efficiency", 0.5, SourceKind.ASSUMED, "no rate in the hardware file: share of memory bandwidth"),
    _constant("domain_efficiency", 0.5, SourceKind.ASSUMED, "gloo over shared memory or loop-back"),
    _constant("tp_efficiency", 1.0, SourceKind.ASSUMED, "as other collectives"),
    _constant("network_efficiency", 0.5, SourceKind.ASSUMED, "gloo over TCP"),
    _constant("dedup_domain_efficiency", 0.5, SourceKind.ASSUMED, "as other collectives"),
    _constant("host_s_per_op", 5e-6, SourceKind.ASSUMED, "no measurement in the hardware file"),
    _constant("host_ops_per_layer_microbatch", 400, SourceKind.FITTED, "small operations in a profile of a step"),
    _constant("host_ops_per_local_expert", 30, SourceKind.FITTED, "views and launches of its products, same profile"),
    _constant("host_exponent", 1.0, SourceKind.ASSUMED, "one thread launches and computes: times add"),
    _constant("host_dense_layer_share", 0.5, SourceKind.ASSUMED, "a dense layer launches about half as much"),
    _constant("host_s_per_recompute_module", 1e-4, SourceKind.ASSUMED, "a few launches"),
    _constant("sync_s_alltoall", 2e-3, SourceKind.FITTED, "ranks wait for each other: step less CPU time, 2 ranks"),
    _constant("optimizer_bytes_per_parameter", 30.0, SourceKind.ASSUMED, "no rate in the hardware file"),
    _constant("step_tail_s", 0.0, SourceKind.ASSUMED, "nothing launched on the side"),
    _constant("reserved_share", 0.0, SourceKind.ASSUMED, "the C allocator returns what is freed"),
    _constant("reserved_share_sd", 0.03, SourceKind.ASSUMED, "spread of unmodelled temporaries"),
    _constant("context_bytes", 0.0, SourceKind.ASSUMED, "the interpreter is not counted"),
    _constant("communicator_bytes", 0.0, SourceKind.ASSUMED, "gloo keeps no staging buffers to speak of"),
    _constant("communicator_bytes_sd", 0.0, SourceKind.ASSUMED, "as above"),
    _constant("workspace_bytes", 0.0, SourceKind.ASSUMED, "library workspaces are small"),
    _constant("stack_bytes", 0.0, SourceKind.ASSUMED, "as above"),
    _constant("logit_bytes", 6.0, SourceKind.ASSUMED, "of fused stacks only"),
    _constant("fp8_weight_copies_bytes", 0.0, SourceKind.ASSUMED, "no 8-bit compute on CPUs"),
    _constant("fp8_input_bytes", 2.0, SourceKind.ASSUMED, "no 8-bit compute on CPUs"),
)


class Constants:
    """Constants of one hardware: the file's own win over the defaults. Reading a name nobody defines is a KeyError."""

    __slots__ = ("_all", "_values")

    def __init__(self, hardware: Hardware) -> None:
        defaults = _CUDA if hardware.device.kind is DeviceKind.CUDA else _CPU
        self._all = {c.name: c for c in (*defaults, *hardware.constants)}
        for name, ops_name in _HOST_OPS:
            if name not in self._all:
                ops, each = self._all[ops_name].value, self._all["host_s_per_op"].value
                self._all[name] = _constant(name, ops.value * each.value, each.kind, f"{ops_name} x host_s_per_op")
        self._values = {name: c.value.value for name, c in self._all.items()}

    def __getitem__(self, name: str) -> float:
        value: float = self._values[name]
        return value

    def listed(self) -> tuple[Constant, ...]:
        """All constants, by name."""
        return tuple(self._all[name] for name in sorted(self._all))
