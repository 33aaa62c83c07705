"""Options that people write for Megatron-LM and that its parser does not have, with what is meant
instead.

Names from blog posts, from Megatron-DeepSpeed, from older releases and from Pai-Megatron-Patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Treatment(StrEnum):
    """What reading a script does with such an option."""

    CHECK = "check"  # a derived number: held against the others
    RENAMED = "same"  # another option means the same
    IGNORE = "drop"  # nothing of a plan depends on it
    SHARDING = "sharding"  # DeepSpeed's way to say ZeRO
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignOption:
    """How many values stand behind it, what is done with it, and why; `means` are the options that
    say it today."""

    treatment: Treatment
    reason: str
    value_count: int = 0
    replacements: tuple[str, ...] = ()


_DERIVED = "is derived, never given: Megatron-LM takes it from the other sizes; here it is checked"
_PAI = "belongs to Pai-Megatron-Patch; no plan depends on it"

FOREIGN_OPTIONS: dict[str, ForeignOption] = {
    "--data-parallel-size": ForeignOption(
        treatment=Treatment.CHECK, reason=_DERIVED, value_count=1
    ),
    "--gradient-accumulation-steps": ForeignOption(
        treatment=Treatment.CHECK, reason=_DERIVED, value_count=1
    ),
    "--use-torch-compile": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="does not exist: fused elementwise functions are compiled by themselves; graphs of kernels are "
        "--cuda-graph-impl",
    ),
    "--use-fused-kernels": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="does not exist: fusions are on unless a --no-...-fusion says otherwise",
    ),
    "--no-async-tensor-model-parallel-allreduce": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="is gone: --sequence-parallel and --tp-comm-overlap are what overlaps tensor parallelism",
    ),
    "--deepspeed": ForeignOption(treatment=Treatment.SHARDING, reason="is Megatron-DeepSpeed's"),
    "--deepspeed-config": ForeignOption(
        treatment=Treatment.SHARDING, reason="is Megatron-DeepSpeed's", value_count=1
    ),
    "--deepspeed_config": ForeignOption(
        treatment=Treatment.SHARDING, reason="is Megatron-DeepSpeed's", value_count=1
    ),
    "--zero-stage": ForeignOption(
        treatment=Treatment.SHARDING, reason="is Megatron-DeepSpeed's", value_count=1
    ),
    "--profile-step-range": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="is --profile --profile-step-start A --profile-step-end B",
        value_count=1,
    ),
    "--profile-output-path": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="is --use-pytorch-profiler with --tensorboard-dir",
        value_count=1,
    ),
    "--fake-init-process-group": ForeignOption(
        treatment=Treatment.RENAMED,
        reason="never existed under this name",
        replacements=("--fake-process-group",),
    ),
    "--sequcen-parallel": ForeignOption(
        treatment=Treatment.RENAMED, reason="is misspelt", replacements=("--sequence-parallel",)
    ),
    "--use-custom-fsdp": ForeignOption(
        treatment=Treatment.RENAMED, reason="was renamed", replacements=("--use-megatron-fsdp",)
    ),
    "--moe-extended-tp": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="is gone: left out, --expert-tensor-parallel-size is the tensor-parallel size, as it said",
    ),
    "--use-legacy-models": ForeignOption(
        treatment=Treatment.REFUSE, reason="is gone, and legacy models with it; leave it out"
    ),
    "--num-experts-per-token": ForeignOption(
        treatment=Treatment.REFUSE, reason="is --moe-router-topk", value_count=1
    ),
    "--expert-parallel-size": ForeignOption(
        treatment=Treatment.REFUSE, reason="is --expert-model-parallel-size", value_count=1
    ),
    "--no-delay-grad-reduce": ForeignOption(
        treatment=Treatment.IGNORE, reason="is gone: --no-align-grad-reduce"
    ),
    "--delay-param-gather": ForeignOption(
        treatment=Treatment.IGNORE, reason="is gone: --no-align-param-gather"
    ),
    "--log-batch-size-to-tensorboard": ForeignOption(
        treatment=Treatment.IGNORE, reason="is gone: always logged"
    ),
    "--local_rank": ForeignOption(
        treatment=Treatment.IGNORE,
        reason="is torch.distributed.launch's; torchrun says it by itself",
        value_count=1,
    ),
    "--patch-tokenizer-type": ForeignOption(treatment=Treatment.IGNORE, reason=_PAI, value_count=1),
    "--extra-vocab-size": ForeignOption(treatment=Treatment.IGNORE, reason=_PAI, value_count=1),
    "--max-padding-length": ForeignOption(treatment=Treatment.IGNORE, reason=_PAI, value_count=1),
    "--train-mode": ForeignOption(treatment=Treatment.IGNORE, reason=_PAI, value_count=1),
    "--dataset": ForeignOption(treatment=Treatment.IGNORE, reason=_PAI, value_count=1),
}
