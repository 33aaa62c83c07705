"""The named constants of the time and memory models.

A hardware file's own constants win over the defaults for its kind of device.
"""

from __future__ import annotations

from moewright.spec.hardware import Constant, Hardware
from moewright.spec.units import GIB, MIB, Sourced, SourceKind, mention
from moewright.spec.workload import Dtype

TIME_FINDINGS = "fit of 96 published MoE rows, centre of the neutral priors"
TIME_FIT = "fit of 333 published rows on six parts"
MEMORY_FINDINGS = "published allocated/reserved pairs and NCCL reports"

# Devices of the median run that the constants were fitted to.
FITTED_DEVICES = 256
# The constants that only offload, only NVFP4, only adapters and only EFA depend on.
OFFLOAD_CONSTANTS = (
    "host_link_Bps",
    "host_link_efficiency",
    "host_memory_bytes",
    "host_optimizer_s_per_parameter",
)
NVFP4_CONSTANTS = ("gemm_4bit_time_scale", "nvfp4_weight_copies_bytes", "nvfp4_input_bytes")
LORA_CONSTANTS = ("frozen_weight_bytes",)
# Nothing in most trainers.
LOAD_SCALE = "natural_load_scale"
EAGER_CONSTANTS = ("eager_loss_bytes", "host_s_per_token")
EFA_CONSTANTS = (
    "efa_alltoall_share",
    "proxy_message_s",
    "proxy_posts_tokens",
    "proxy_rail_share",
    "proxy_token_s",
    "proxy_token_wait_s",
    "proxy_wait_s",
)

_FOUR_BIT = (
    "NVFP4 beside FP8; nine rows of dense Llama 3 on GB300, one model from the other 9-12 % off"
)
_OFFLOADED_OPTIMIZER = (
    "Megatron-Bridge guide to CPU offload: Qwen3-30B-A3B on 16 H100, 0.996 s a step, 4.189 s with"
    " every state offloaded"
)
_NARROW_HEADS = (
    "AIConfigurator 0.11.0 attention tables: heads of 64 reach 0.78 (Hopper) and 0.64 (Blackwell)"
    " of heads of 128"
)
_CUBLAS = "workspace of a handle in PyTorch: 8 MiB and 128 KiB, but 32 MiB on Hopper"
_ALLOCATED_ERRORS = "covers 80 % of 114 published peaks of torch's allocator, none of them fitted"
_HEAD_PLACEHOLDER = "Megatron-LM e7c55de99e (2025-08) caches the head's gradient placeholder"
_GEMM_WORKSPACE = "Transformer Engine, a stream: 32 MiB from Hopper on; Megatron-LM golden values"
_EFA_RUNS = (
    "Qwen3-30B-A3B on 64 H100 over EFA, awsome-distributed-ai 95b939cd: 6 pairs of dispatchers"
)
_DEVICE_SPREAD = (
    "deviation of the speeds of equal devices; dgxc runs of one layout on 8 to 2,304 H100"
)
_LIBRARY_CALL = (
    "a node of the group; AIConfigurator 0.11.0 DeepEP tables extrapolated to no tokens: 33, 102,"
    " 142 us on 1, 2, 4 nodes"
)
_MISALIGNED = (
    "BLOOM chronicles (2022): hidden 14,400 over TP 8 beside 13,824 on 320 A100, 1.30 of the step"
)
_FUSED_PASSES = "norms, activations and rotations in a kernel each; more where they run eagerly"
_OWN_KERNELS = "kernels made for the part; more where a run names older ones"
_NO_TOKEN_LOOP = "trainers that read no token on the host; the device waits while one does"
_OWN_SUMS = "seconds an element of token rows that atomics sum; kernels for it use none"
_ATOMIC_SUMS = (
    "an element that torch sums by atomics on H100: 31 ps on the 78 multiprocessors of an H20"
    " (FlagGems pull request 4502); 43 ps both ways beside fused ones (DLBlas pull request 66)"
)
_BIAS_ROWS = (
    "a row of an expert's bias gradient, added after the row before it: gpt-oss-20b on B300 runs"
    " 1.65 x (EP 1) and about 5 x (EP 8) as fast without, 12 and 10 us a row (whitecircle/halo,"
    " grouped-gemm.md)"
)
_SHARDED_COPIES = "PyTorch's fully_shard copies weights out of gathered buffers, and gradients in"
_FUSED_LOSS = "bytes a logit that an unfused loss moves beyond the fused one"
_LOOPED_PRODUCT = "experts one by one: ten launches of about 12 us a product, forward and backward"
_DROPPED_ROWS = (
    "Megatron-LM's router takes the top tokens of every expert and masks again: about 20 launches"
    " of 12 us"
)
_WEIGHT_TRAFFIC = "expert weights and their sums, the rest under products"
_RECOMPUTED_MOE = "a MoE block launches about this share of its layer's forward; docs/findings.md 2"

_DELAYED_GRADIENTS = (
    "Qwen3-30B-A3B on 16 H100: 31.31 s, and 31.20 s with delayed gradients, where the windows would"
    " gain three times as much"
)

_OWN_RATES = "rates are this machine's own"
_NO_RATE = "no rate in the hardware file"
_NO_MEASUREMENT = "no measurement in the hardware file"
_OTHER_COLLECTIVES = "as other collectives"
_SHARED_CORES = "collectives and products share the cores"
_NO_LIBRARY = "no such library on a CPU"
_ONE_THREAD = "one thread launches and computes: times add"
_ONE_MEMORY = "host and device are one memory"
_MEASURED_ENGINE = "the engine that runs is the one that was measured"
_NO_GRAPHS = "no graphs on a CPU"
_NO_8BIT = "no 8-bit compute on CPUs"
_NO_4BIT = "no 4-bit compute on CPUs"


def _constant(name: str, value: float, kind: SourceKind, source: str) -> Constant:
    return Constant(name=name, value=Sourced(value=value, kind=kind, source=source))


def _assumed(name: str, value: float, source: str) -> Constant:
    return _constant(name, value, SourceKind.ASSUMED, source)


def _fitted(name: str, value: float, source: str) -> Constant:
    return _constant(name, value, SourceKind.FITTED, source)


def _measured(name: str, value: float, source: str) -> Constant:
    return _constant(name, value, SourceKind.MEASURED, source)


def _datasheet(name: str, value: float, source: str) -> Constant:
    return _constant(name, value, SourceKind.DATASHEET, source)


def _fit_source(sd: float, what: str = "") -> str:
    """Return the source of a constant that calibration.fit fitted.

    `sd` is the standard deviation of its logarithm.
    """
    fit = f"{TIME_FIT}, +-{100 * sd:.0f} %"
    return mention("{}; ", what) + fit


_ACCELERATOR = (
    _fitted("gemm_time_scale", 1.13, _fit_source(0.03)),
    _fitted("gemm_8bit_time_scale", 1.07, _fit_source(0.04)),
    _fitted("gemm_mx_time_scale", 1.11, _fit_source(0.03, "MXFP8 beside FP8")),
    _fitted("gemm_4bit_time_scale", 0.61, _FOUR_BIT),
    _fitted("grouped_gemm_time_scale", 0.882, _fit_source(0.05, "beside that of other GEMMs")),
    _fitted("weight_traffic_time_scale", 0.381, _fit_source(0.35, _WEIGHT_TRAFFIC)),
    _fitted("attention_time_scale", 0.879, _fit_source(0.06)),
    _fitted("attention_backward_time_scale", 0.879, _fit_source(0.06)),
    _assumed("attention_kernel_time_scale", 1.0, _OWN_KERNELS),
    _assumed("eager_pass_time_scale", 1.0, _FUSED_PASSES),
    _fitted("elementwise_time_scale", 1.43, _fit_source(0.07)),
    _fitted("optimizer_time_scale", 1.0, TIME_FINDINGS),
    _fitted("alltoall_inside_time_scale", 0.77, _fit_source(0.08)),
    _fitted("alltoall_between_time_scale", 1.06, _fit_source(0.14)),
    _assumed("gemm_efficiency", 0.74, "middle of published bf16 GEMM tables, 0.67-0.78 of peak"),
    _fitted("grouped_rolloff_rows", 60.0, TIME_FINDINGS),
    _measured("narrow_head_time_scale", 1.43, _NARROW_HEADS),
    _measured("misaligned_gemm_time_scale", 1.36, _MISALIGNED),
    _fitted("scan_time_scale", 2.21, _fit_source(0.15, "scans of Nemotron hybrids")),
    _assumed("attention_efficiency", 0.62, "published attention tables, long sequences"),
    _assumed(
        "attention_half_seq", 1600.0, "published attention tables: half the rate at this length"
    ),
    _assumed("attention_backward_efficiency", 0.632, "2.5 x the forward FLOPs at 0.79 of its rate"),
    _fitted("sink_attention_time_scale", 4.54, _fit_source(0.16, "sinks, heads of 64")),
    _fitted("router_efficiency", 0.3, TIME_FINDINGS),
    _fitted("memory_efficiency", 0.8, TIME_FINDINGS),
    _fitted("domain_efficiency", 0.7, "NCCL all-to-all bus bandwidth over nominal, H800"),
    _fitted("tp_time_scale", 0.585, _fit_source(0.19)),
    _fitted("tp_overlap_hidden", 0.433, _fit_source(0.30, "under its GEMMs")),
    _fitted("dedup_inside_time_scale", 0.711, _fit_source(0.12)),
    _fitted("dedup_between_time_scale", 0.897, _fit_source(0.15)),
    _fitted("tp_efficiency", 0.75, "of the NCCL bus bandwidth; " + TIME_FINDINGS),
    _fitted("network_efficiency", 0.9, "45 of 50 GB/s a NIC; " + TIME_FINDINGS),
    _fitted("dedup_domain_efficiency", 0.58, "DeepEP inside one node, 260 of 450 GB/s"),
    _fitted("host_s_per_layer_microbatch", 0.00396, _fit_source(0.14, "eager")),
    _fitted("host_per_year", 1.43, _fit_source(0.07, "host work grows so much a year of age")),
    _assumed("stack_age_years", 0.0, "software of mid-2026"),
    _fitted("host_graphed_attention", 0.295, _fit_source(0.23, "share its graph saves")),
    _fitted("host_graphed_router", 0.366, _fit_source(0.20, "share its graph saves")),
    _fitted("host_s_full_graph", 0.0, TIME_FINDINGS),
    _fitted("host_exponent", 1.72, _fit_source(0.07)),
    _fitted("host_exponent_synced", 1.43, _fit_source(0.07, "1F1B waits for every transfer")),
    _fitted("host_exponent_unblocked", 1.95, _fit_source(0.12, "no layer waits for split sizes")),
    _fitted("host_dense_layer_share", 0.449, _fit_source(0.18, "of a layer with experts")),
    _assumed("host_recomputed_moe_share", 0.6, _RECOMPUTED_MOE),
    _assumed("host_s_per_local_expert", 2e-5, "launches that grow with the local experts"),
    _fitted("host_s_per_narrow_expert", 0.000103, _fit_source(0.23, "casts of an expert")),
    _assumed("host_s_per_expert_product", 1.2e-4, _LOOPED_PRODUCT),
    _assumed("host_s_per_recompute_module", 1e-4, TIME_FINDINGS),
    _assumed("host_s_per_drop", 2.4e-4, _DROPPED_ROWS),
    _assumed("host_s_per_token", 0.0, _NO_TOKEN_LOOP),
    _assumed("eager_loss_bytes", 0.0, _FUSED_LOSS),
    _measured("atomic_sum_s", 2e-11, _ATOMIC_SUMS),
    _measured("expert_bias_row_s", 1e-5, _BIAS_ROWS),
    _assumed("zero3_copies", 1.0, _SHARDED_COPIES),
    _measured("delayed_gradient_share", 0.35, _DELAYED_GRADIENTS),
    _fitted("ep_overlap_hidden", 0.675, _fit_source(0.08)),
    _fitted("tp_host", 1.31, _fit_source(0.08, "its collectives are launched too")),
    _fitted("dp_overlap_host", 1.19, _fit_source(0.09, "hooks of sums and gathers")),
    _fitted("ep_overlap_host", 1.27, _fit_source(0.11)),
    _fitted("sync_s_alltoall", 0.00062, _fit_source(0.34, "a wait for split sizes, forward")),
    _fitted("sync_s_deepep", 0.00017, _fit_source(0.98, "a wait for counts, forward")),
    _fitted("sync_s_fused", 3e-5, "DeepEP and HybridEP, beside their calls; " + TIME_FINDINGS),
    _fitted("device_spread", 0.016, _DEVICE_SPREAD),
    _assumed("step_jitter_s", 5e-3, "the loader and the host's other work between two steps"),
    _assumed("network_hop_s", 1e-5, "NCCL 2.19 tuning table: 4 to 14 us a step of a ring"),
    _assumed("alltoall_peer_s", 2e-6, "a message of NCCL to a peer beyond the domain"),
    _fitted("efa_alltoall_share", 0.7, "of what rings reach; " + _EFA_RUNS),
    _measured("library_call_s", 3.5e-5, _LIBRARY_CALL),
    _fitted("proxy_message_s", 1e-05, f"a put, a fence and a signal over EFA; {_EFA_RUNS}"),
    _fitted("proxy_wait_s", 6e-4, f"for counts, a direction; {_EFA_RUNS}"),
    _assumed("proxy_rail_share", 0.25, "one of four NICs; DeepEP pull request 574"),
    _fitted("proxy_token_s", 2e-06, f"UCCL: a command a token; {_EFA_RUNS}"),
    _fitted("proxy_token_wait_s", 3.2e-3, f"UCCL: for counts, a direction; {_EFA_RUNS}"),
    _assumed("proxy_posts_tokens", 0.0, "1: the library's proxy posts each token by itself"),
    _fitted("optimizer_bytes_per_parameter", 60.0, "1.5 x the 40 bytes of a fused step"),
    _measured(
        "step_time_sd",
        0.11,
        "80 % of complete rows of left-out publishers within 17 %; docs/accuracy",
    ),
    _assumed("choice_time_sd", 0.06, "a choice that no published run made; adds in squares"),
    _assumed("pair_time_sd", 0.015, "a pair of choices that no run made together; in squares"),
    _fitted("step_tail_s", 0.02, TIME_FINDINGS),
    _fitted("overlapped_dp_share", 0.269, _fit_source(0.19)),
    _assumed(LOAD_SCALE, 1.0, "excess of the hottest rank's load over the expected one"),
    _datasheet("host_link_Bps", 64e9, "PCIe Gen5 x16, one direction"),
    _assumed("host_link_efficiency", 0.8, "pinned copies reach 50 of 64 GB/s"),
    _assumed("host_memory_bytes", 0.0, "of a node; 0: no source says how much its hosts have"),
    _measured("host_optimizer_s_per_parameter", 1.68e-9, _OFFLOADED_OPTIMIZER),
    _measured("reserved_share", 0.045, "21 layouts, 2.5-9.3 %; " + MEMORY_FINDINGS),
    _measured("reserved_share_sd", 0.018, MEMORY_FINDINGS),
    _measured("allocated_share_sd", 0.035, _ALLOCATED_ERRORS),
    _assumed("context_bytes", 0.55 * GIB, "CUDA context and libraries"),
    _assumed("communicator_bytes", 0.45 * GIB, "one a group; NCCL issue 964 says 0.5-0.7"),
    _assumed("communicator_bytes_sd", 0.2 * GIB, MEMORY_FINDINGS),
    _datasheet("cublas_bytes", 8.125 * MIB, _CUBLAS),
    _measured("head_placeholder_years", 0.9, _HEAD_PLACEHOLDER),
    _measured("gemm_workspace_bytes", 32 * MIB, _GEMM_WORKSPACE),
    _assumed("frozen_weight_bytes", 2.0, "an element of weights beside which adapters train"),
    _assumed("stack_bytes", 0.0, "what a software stack holds beside all of this; fitted a stack"),
    _assumed("logit_bytes", 6.0, "bf16 logits and their fp32 softmax; 2 when fused in place"),
    _fitted("fp8_weight_copies_bytes", 2.0, "row- and column-wise; 11 FP8-Flow pairs, median 1.6"),
    _assumed("fp8_input_bytes", 1.0, "8-bit linears keep their quantised input"),
    _assumed("nvfp4_weight_copies_bytes", 1.125, "row- and column-wise, 4 + 8/16 bits an element"),
    _assumed("nvfp4_input_bytes", 0.5625, "4-bit linears keep their input in 4 + 8/16 bits"),
)

_CPU = (
    _assumed("gemm_time_scale", 1.0, _OWN_RATES),
    _assumed("gemm_8bit_time_scale", 1.0, _OWN_RATES),
    _assumed("gemm_mx_time_scale", 1.0, _OWN_RATES),
    _assumed("grouped_gemm_time_scale", 1.0, _OWN_RATES),
    _assumed("weight_traffic_time_scale", 1.0, _OWN_RATES),
    _assumed("attention_time_scale", 1.0, _OWN_RATES),
    _assumed("attention_backward_time_scale", 1.0, _OWN_RATES),
    _assumed("attention_kernel_time_scale", 1.0, _OWN_RATES),
    _assumed("eager_pass_time_scale", 1.0, _OWN_RATES),
    _assumed("elementwise_time_scale", 1.0, _OWN_RATES),
    _assumed("optimizer_time_scale", 1.0, _OWN_RATES),
    _assumed("alltoall_inside_time_scale", 1.0, _OWN_RATES),
    _assumed("alltoall_between_time_scale", 1.0, _OWN_RATES),
    _assumed("gemm_efficiency", 0.8, "no rate in the hardware file: share of its peak"),
    _assumed("grouped_rolloff_rows", 60.0, _NO_RATE),
    _assumed("narrow_head_time_scale", 1.0, _OWN_RATES),
    _assumed("misaligned_gemm_time_scale", 1.0, _OWN_RATES),
    _assumed("scan_time_scale", 1.0, _OWN_RATES),
    _assumed("sink_attention_time_scale", 1.0, _OWN_RATES),
    _assumed("attention_efficiency", 0.3, "no rate in the hardware file: share of its peak"),
    _assumed("attention_half_seq", 0.0, _NO_RATE),
    _assumed("attention_backward_efficiency", 0.8, _NO_RATE),
    _assumed("router_efficiency", 1.0, "an fp32 GEMM has its own rate"),
    _assumed("memory_efficiency", 0.5, "no rate in the hardware file: share of memory bandwidth"),
    _assumed("domain_efficiency", 0.5, "gloo over shared memory or loop-back"),
    _assumed("tp_efficiency", 1.0, _OTHER_COLLECTIVES),
    _assumed("tp_time_scale", 1.0, _OTHER_COLLECTIVES),
    _assumed("tp_overlap_hidden", 0.0, _SHARED_CORES),
    _assumed("delayed_gradient_share", 0.0, _SHARED_CORES),
    _assumed("ep_overlap_hidden", 0.0, _SHARED_CORES),
    _assumed("tp_host", 1.0, "collectives have their own time"),
    _assumed("dp_overlap_host", 1.0, "one thread launches and computes"),
    _assumed("ep_overlap_host", 1.0, _SHARED_CORES),
    _assumed("host_per_year", 1.0, _MEASURED_ENGINE),
    _assumed("stack_age_years", 0.0, _MEASURED_ENGINE),
    _assumed("host_graphed_attention", 0.0, _NO_GRAPHS),
    _assumed("host_graphed_router", 0.0, _NO_GRAPHS),
    _assumed("dedup_inside_time_scale", 1.0, _OTHER_COLLECTIVES),
    _assumed("dedup_between_time_scale", 1.0, _OTHER_COLLECTIVES),
    _assumed("network_efficiency", 0.5, "gloo over TCP"),
    _assumed("dedup_domain_efficiency", 0.5, _OTHER_COLLECTIVES),
    _assumed("host_s_per_layer_microbatch", 4e-3, _NO_MEASUREMENT),
    _assumed("host_s_per_local_expert", 1e-4, _NO_MEASUREMENT),
    _assumed("host_s_per_narrow_expert", 0.0, _NO_8BIT),
    _assumed("host_exponent", 1.0, _ONE_THREAD),
    _assumed("host_exponent_synced", 1.0, _ONE_THREAD),
    _assumed("host_exponent_unblocked", 1.0, _ONE_THREAD),
    _assumed("host_dense_layer_share", 0.5, "a dense layer launches about half as much"),
    _assumed("host_recomputed_moe_share", 0.6, _RECOMPUTED_MOE),
    _assumed("host_s_per_expert_product", 1.2e-4, _LOOPED_PRODUCT),
    _assumed("host_s_per_recompute_module", 1e-4, "a few launches"),
    _assumed("host_s_per_drop", 0.0, _MEASURED_ENGINE),
    _assumed("host_s_per_token", 0.0, _NO_TOKEN_LOOP),
    _assumed("eager_loss_bytes", 0.0, _FUSED_LOSS),
    _assumed("atomic_sum_s", 0.0, _OWN_SUMS),
    _assumed("expert_bias_row_s", 0.0, _OWN_SUMS),
    _assumed("zero3_copies", 0.0, "in the time of its collectives"),
    _fitted("sync_s_alltoall", 4e-3, "ranks wait for each other: step less CPU time, 2 ranks"),
    _assumed("sync_s_deepep", 0.0, "no such dispatcher on a CPU: as all-to-all"),
    _assumed("sync_s_fused", 2e-3, "no such dispatcher on a CPU: as all-to-all"),
    _assumed("host_s_full_graph", 0.0, _NO_GRAPHS),
    _assumed("overlapped_dp_share", 1.0, _SHARED_CORES),
    _assumed(LOAD_SCALE, 1.0, "loads of its runs are measured"),
    _assumed("device_spread", 0.0, _MEASURED_ENGINE),
    _assumed("step_jitter_s", 0.0, "in the measured end of a step"),
    _assumed("network_hop_s", 0.0, _OTHER_COLLECTIVES),
    _assumed("alltoall_peer_s", 0.0, _OTHER_COLLECTIVES),
    _assumed("efa_alltoall_share", 1.0, _OTHER_COLLECTIVES),
    _assumed("library_call_s", 0.0, _NO_LIBRARY),
    _assumed("proxy_message_s", 0.0, _NO_LIBRARY),
    _assumed("proxy_wait_s", 0.0, _NO_LIBRARY),
    _assumed("proxy_rail_share", 1.0, _NO_LIBRARY),
    _assumed("proxy_token_s", 0.0, _NO_LIBRARY),
    _assumed("proxy_token_wait_s", 0.0, _NO_LIBRARY),
    _assumed("proxy_posts_tokens", 0.0, _NO_LIBRARY),
    _assumed("optimizer_bytes_per_parameter", 30.0, _NO_RATE),
    _measured("step_time_sd", 0.35, "two ranks: 178 ms predicted, 283 taken; 250, 350; 73, 87"),
    _assumed("choice_time_sd", 0.0, _MEASURED_ENGINE),
    _assumed("pair_time_sd", 0.0, _MEASURED_ENGINE),
    _assumed("step_tail_s", 0.0, "nothing launched on the side"),
    _assumed("host_link_Bps", 1e12, _ONE_MEMORY),
    _assumed("host_link_efficiency", 1.0, _ONE_MEMORY),
    _assumed("host_memory_bytes", 0.0, _ONE_MEMORY),
    _assumed("host_optimizer_s_per_parameter", 0.0, _ONE_MEMORY),
    _assumed("reserved_share", 0.0, "what the engine frees it keeps for itself"),
    _assumed("reserved_share_sd", 0.03, "spread of unmodelled temporaries"),
    _assumed("allocated_share_sd", 0.0, "what is allocated is counted"),
    _assumed("context_bytes", 0.0, "the interpreter is not counted"),
    _assumed("communicator_bytes", 0.0, "gloo keeps no staging buffers to speak of"),
    _assumed("communicator_bytes_sd", 0.0, "as above"),
    _assumed("cublas_bytes", 0.0, "library workspaces are small"),
    _assumed("gemm_workspace_bytes", 0.0, "library workspaces are small"),
    _assumed("head_placeholder_years", 0.0, "of fused stacks only"),
    _assumed("frozen_weight_bytes", 2.0, "no adapters on a CPU"),
    _assumed("stack_bytes", 0.0, "as above"),
    _assumed("logit_bytes", 6.0, "of fused stacks only"),
    _assumed("fp8_weight_copies_bytes", 0.0, _NO_8BIT),
    _assumed("fp8_input_bytes", 2.0, _NO_8BIT),
    _assumed("gemm_4bit_time_scale", 1.0, _NO_4BIT),
    _assumed("nvfp4_weight_copies_bytes", 0.0, _NO_4BIT),
    _assumed("nvfp4_input_bytes", 2.0, _NO_4BIT),
)


class Constants:
    """The constants of one hardware, by name; a name that nobody defines is a KeyError."""

    __slots__ = ("_constants", "_values")

    def __init__(self, hardware: Hardware) -> None:
        defaults = _ACCELERATOR if hardware.device.kind.is_accelerator else _CPU
        # The last of a name wins.
        constants = (*defaults, *hardware.constants)
        self._constants = {constant.name: constant for constant in constants}
        self._values = {constant.name: constant.value.value for constant in constants}

    def __getitem__(self, name: str) -> float:
        value: float = self._values[name]
        return value

    def low_precision_bytes(self, what: str, dtype: Dtype) -> float:
        """Return the bytes an element of what linear layers of a narrow dtype keep.

        `what` is "weight_copies" or "input".
        """
        recipe = "nvfp4" if dtype is Dtype.NVFP4 else "fp8"
        return self[f"{recipe}_{what}_bytes"]

    def list_all(self) -> tuple[Constant, ...]:
        """Return all constants, sorted by name."""
        return tuple(self._constants[name] for name in sorted(self._constants))
