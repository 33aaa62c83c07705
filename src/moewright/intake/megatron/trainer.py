"""What a Megatron-LM command says about kernels and dropout, as a TrainerSpec."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moewright.intake.megatron.arguments import Arguments
from moewright.spec.units import KIB
from moewright.spec.workload import (
    AttentionBackend,
    CrossEntropyKernel,
    ExpertKernels,
    Fusion,
    TrainerSpec,
)

_CUBLAS_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_DROPOUT = 0.1  # Megatron-LM's default for both
# Transformer Engine's switches of its backends, in the order in which it prefers them.
_TILED_BACKENDS = (
    ("NVTE_FLASH_ATTN", AttentionBackend.FLASH),
    ("NVTE_FUSED_ATTN", AttentionBackend.FUSED),
)


def read_trainer(arguments: Arguments, environment: Mapping[str, str]) -> TrainerSpec:
    """Return the choices of a command that is started in `environment`.

    Options of fusions that change neither bytes nor launches by much are counted as read.
    """
    arguments.ignore(
        "--no-masked-softmax-fusion",
        "--attention-softmax-in-fp32",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-persist-layer-norm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--moe-use-grouped-tensor",
    )
    return TrainerSpec(
        attention_backend=_read_attention_backend(arguments, environment),
        attention_dropout=arguments.number("--attention-dropout", _DROPOUT),
        hidden_dropout=arguments.number("--hidden-dropout", _DROPOUT),
        cublas_workspace_bytes=_parse_workspace(environment.get(_CUBLAS_CONFIG, "")),
        cross_entropy=_read_cross_entropy(arguments),
        expert_kernels=_read_expert_kernels(arguments),
        unfused=tuple(sorted(_read_unfused(arguments))),
    )


def _read_attention_backend(
    arguments: Arguments, environment: Mapping[str, str]
) -> AttentionBackend:
    """Return the backend that the command ends up with.

    Megatron-LM's own layers have one of their own. Transformer Engine takes what is asked for, else
    the first that its environment does not switch off.
    """
    arguments.ignore("--use-flash-attn")
    backend = arguments.text("--attention-backend", "auto").rpartition(".")[2]
    if arguments.text("--transformer-impl", "transformer_engine") == "local":
        return AttentionBackend.LOCAL
    if backend != "auto":
        return AttentionBackend(backend)
    for switch, tiled in _TILED_BACKENDS:
        if environment.get(switch, "1") != "0":
            return tiled
    return AttentionBackend.UNFUSED


def _read_expert_kernels(arguments: Arguments) -> ExpertKernels:
    """Return how experts are computed: one after the other unless the command says otherwise."""
    if arguments.has("--moe-grouped-gemm") or not arguments.has("--num-experts"):
        return ExpertKernels.GROUPED
    return ExpertKernels.SEQUENTIAL


def _parse_workspace(config: str) -> int:
    """Return the bytes of pairs :KiB:count such as ":4096:8"; 0 where there are none."""
    pairs = re.findall(r":(\d+):(\d+)", config)
    return sum(int(size) * int(count) for size, count in pairs) * KIB


def _read_cross_entropy(arguments: Arguments) -> CrossEntropyKernel:
    """Return the loss's kernel; Megatron-LM's own fusion is torch.compile's."""
    implementation = arguments.text("--cross-entropy-fusion-impl", "native")
    if not arguments.has("--cross-entropy-loss-fusion"):
        return CrossEntropyKernel.FP32
    return CrossEntropyKernel.IN_PLACE if implementation == "te" else CrossEntropyKernel.COMPILED


def _read_unfused(arguments: Arguments) -> set[Fusion]:
    is_gated = arguments.has("--swiglu") or arguments.has("--quick-geglu")
    activation = "--no-bias-swiglu-fusion" if is_gated else "--no-bias-gelu-fusion"
    # Of activations without a gate only the squared ReLU is fused with the router's weight.
    is_fused = is_gated or arguments.has("--use-fused-weighted-squared-relu")
    is_plain = arguments.has("--num-experts") and not is_fused
    switches = {
        Fusion.ACTIVATION: arguments.has(activation) or is_plain,
        Fusion.WEIGHT_GRAD: arguments.has("--no-gradient-accumulation-fusion"),
    }
    return {fusion for fusion, is_off in switches.items() if is_off}
