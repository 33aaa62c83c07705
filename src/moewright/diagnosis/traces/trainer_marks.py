"""What names in a trace show of the trainer: its kind, and what it has switched on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moewright.diagnosis.traces.capture import CommChannel, KernelKind, TrainerMark, kernel_kind

# Names of Megatron-Core, TransformerEngine, DeepEP, vLLM and torch. `permute` and `grouped` alone
# are no evidence: other models permute and group as well.
_MARKS_OF_NAMES: tuple[tuple[TrainerMark, re.Pattern[str]], ...] = (
    (
        TrainerMark.MOE,
        re.compile(
            r"(?<![a-z])moe(?![a-z]{2})|MoE|expert(?!imental)|unpermute|row_id_map|sort_chunks_by|"
            r"token_dispatcher|topk_gating",
        ),
    ),
    (TrainerMark.DDP, re.compile(r"DistributedDataParallel|nn/parallel/distributed\.py")),
    (TrainerMark.FSDP, re.compile(r"FullyShardedDataParallel|FSDP::|fsdp/_fully_shard")),
    (TrainerMark.MEGATRON, re.compile(r"megatron[/._]", re.IGNORECASE)),
    (TrainerMark.GRAPHS, re.compile(r"^(cuda|hip)GraphLaunch|CUDA graph")),
    (TrainerMark.EXCHANGES, re.compile(r"all_?to_?all", re.IGNORECASE)),
    (
        TrainerMark.SENDS,
        re.compile(r"nccl:(send|recv|coalesced)|c10d::(send|recv)|p2p_communication|isend_irecv"),
    ),
    (TrainerMark.FUSED_PERMUTE, re.compile(r"^_?(un)?permute_kernel|moe_permute_(mask|topK)")),
)
_MEGATRON_GROUP = re.compile(r"^[A-Z_]+_PARALLEL_GROUP")
_EXCHANGES = ("deepep", "hybridep", "mori")


def find_trainer_marks(
    names: Iterable[str], channels: Iterable[CommChannel]
) -> tuple[TrainerMark, ...]:
    """Return what the names of kernels and host ranges, and the groups, show of the trainer."""
    marks = {*_marks_of_names(names), *_marks_of_channels(channels)}
    return tuple(mark for mark in TrainerMark if mark in marks)


def _marks_of_names(names: Iterable[str]) -> Iterator[TrainerMark]:
    for name in names:
        for mark, pattern in _MARKS_OF_NAMES:
            if pattern.search(name):
                yield mark
        if kernel_kind(name) is KernelKind.GROUPED_GEMM:
            yield TrainerMark.GROUPED_GEMM


def _marks_of_channels(channels: Iterable[CommChannel]) -> Iterator[TrainerMark]:
    for channel in channels:
        if channel.library in _EXCHANGES:
            yield TrainerMark.MOE
        if channel.library == "deepep":
            yield TrainerMark.DEEPEP
        if _MEGATRON_GROUP.match(channel.description):
            yield TrainerMark.MEGATRON
        if "EXPERT" in channel.description:
            yield TrainerMark.MOE
