"""What a Megatron-LM command says of its kernels, of Muon, and of a schedule of batch sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moewright.intake.megatron.options import Arguments
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import KIB
from moewright.spec.workload import (
    AttentionBackend,
    BatchRampSpec,
    CrossEntropyKernel,
    ExpertKernels,
    Fusion,
    MuonCoefficients,
    MuonScale,
    MuonSpec,
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
        bf16_first_layers=_read_wide_layers(arguments, "--num-layers-at-start-in-bf16"),
        bf16_last_layers=_read_wide_layers(arguments, "--num-layers-at-end-in-bf16"),
    )


def _read_wide_layers(arguments: Arguments, option: str) -> int:
    """Return the layers at an end of the model that stay in 16 bits: 1 unless it is said."""
    layers = round(arguments.number(option, 1))
    return layers if arguments.has("--first-last-layers-bf16") else 0


def _read_attention_backend(
    arguments: Arguments, environment: Mapping[str, str]
) -> AttentionBackend:
    """Return the backend that the command ends up with.

    Megatron-LM's own layers have one of their own, or FlashAttention's where they are asked for it,
    as those of forks and of releases before 2024 take it. Transformer Engine takes what is asked
    for, else the first that its environment does not switch off.
    """
    asks_for_flash = arguments.has("--use-flash-attn")
    backend = arguments.text("--attention-backend", "auto").rpartition(".")[2]
    if arguments.text("--transformer-impl", "transformer_engine") == "local":
        return AttentionBackend.FLASH if asks_for_flash else AttentionBackend.LOCAL
    if backend != "auto":
        return AttentionBackend(backend)
    for switch, tiled in _TILED_BACKENDS:
        if environment.get(switch, "1") != "0":
            return tiled
    return AttentionBackend.UNFUSED


def _read_expert_kernels(arguments: Arguments) -> ExpertKernels:
    """Return how experts are computed: one after the other unless the command says otherwise."""
    is_fused = arguments.has("--use-transformer-engine-op-fuser")
    if arguments.has("--moe-grouped-gemm") or not arguments.has("--num-experts"):
        return ExpertKernels.FUSED if is_fused else ExpertKernels.GROUPED
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
    is_moe = arguments.has("--num-experts")
    is_local = arguments.text("--transformer-impl", "transformer_engine") == "local"
    is_permute_fused = arguments.has("--moe-permute-fusion")
    switches = {
        Fusion.ACTIVATION: arguments.has(activation) or (is_moe and not is_fused),
        Fusion.WEIGHT_GRAD: arguments.has("--no-gradient-accumulation-fusion"),
        Fusion.PERMUTE: is_moe and not is_local and not is_permute_fused,
    }
    return {fusion for fusion, is_off in switches.items() if is_off}


# What Megatron-LM can do otherwise, which no prediction here depends on and training here would.
_OTHER_CHOICES = (
    ("--muon-tp-mode", "duplicated", ("duplicated", "distributed")),
    ("--muon-scalar-optimizer", "adam", ("adam",)),
    ("--muon-coefficient-type", "quintic", tuple(MuonCoefficients)),
)


def read_muon(arguments: Arguments) -> tuple[MuonSpec, tuple[str, ...]]:
    """Return how Muon updates matrices, and notes on what is taken for something else."""
    arguments.ignore("--muon-use-syrk", "--muon-fp32-matmul-prec")
    default = MuonSpec()
    notes = [
        f"{name} {value} is taken for {taken_for}: no prediction depends on it, training here would"
        for name, taken_for, run_here in _OTHER_CHOICES
        if (value := arguments.text(name, taken_for)) not in run_here
    ]
    if arguments.has("--muon-no-split-qkv"):
        notes.append("--muon-no-split-qkv is not taken: training here updates q, k and v apart")
    coefficients = arguments.text("--muon-coefficient-type", default.muon_coefficient_type)
    if coefficients not in tuple(MuonCoefficients):
        coefficients = default.muon_coefficient_type
    muon = MuonSpec(
        muon_momentum=arguments.number("--muon-momentum", default.muon_momentum),
        muon_nesterov=arguments.has("--muon-nesterov"),
        muon_num_ns_steps=arguments.integer("--muon-num-ns-steps", default.muon_num_ns_steps),
        muon_coefficient_type=MuonCoefficients(coefficients),
        muon_scale_mode=MuonScale(
            arguments.text("--muon-scale-mode", default.muon_scale_mode.value)
        ),
        muon_extra_scale_factor=arguments.number(
            "--muon-extra-scale-factor", default.muon_extra_scale_factor
        ),
    )
    return muon, tuple(notes)


SCHEDULE = "--step-batch-size-schedule"
_ENTRY = re.compile(r"([0-9.]+)([KMBT]?):([0-9.]+)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """The full global batch of a schedule, and how batches grow to it."""

    global_batch: int
    ramp: BatchRampSpec


def read_batch_schedule(arguments: Arguments, seq_len: int) -> BatchSchedule:
    """Read "0:512 1B:1024 2B:1536": tokens before, and the batch from there on.

    Raises:
        BadInput: an entry cannot be read, or batches do not grow in equal steps.
    """
    text = arguments.text(SCHEDULE)
    sizes = sorted(_read_entry(entry, seq_len) for entry in text.replace(",", " ").split())
    if not sizes or sizes[0][0] != 0:
        raise BadInput(Reason(field=SCHEDULE, value=text[:60], rule="begins with a batch at 0"))
    start = sizes[0][1]
    full = sizes[-1][1]
    if len(sizes) == 1:
        return BatchSchedule(global_batch=full, ramp=BatchRampSpec())
    increment = sizes[1][1] - start
    count = len(sizes) - 1
    samples = sizes[-1][0]
    is_ramp = increment > 0 and all(
        size == start + stage * increment and first == -(-stage * samples // count)
        for stage, (first, size) in enumerate(sizes)
    )
    if not is_ramp:
        rule = "is planned here where batches grow in equal steps after equally many tokens"
        raise BadInput(Reason(field=SCHEDULE, value=text[:60], rule=rule))
    ramp = BatchRampSpec(ramp_start=start, ramp_increment=increment, ramp_samples=samples)
    return BatchSchedule(global_batch=full, ramp=ramp)


def _read_entry(entry: str, seq_len: int) -> tuple[int, int]:
    """Return (sequences before, batch size) of an entry."""
    match = _ENTRY.fullmatch(entry)
    if not match:
        rule = "has entries of tokens and a batch size, such as 250B:1536"
        raise BadInput(Reason(field=SCHEDULE, value=entry[:60], rule=rule))
    tokens, unit, size, size_unit = match.groups()
    first = int(float(tokens) * _UNITS[unit.upper()]) // seq_len
    return first, int(float(size) * _UNITS[size_unit.upper()])
