"""Options that people write for Megatron-LM and that its parser does not have, with what is meant
instead.

Names from blog posts, from Megatron-DeepSpeed, from older releases and from Pai-Megatron-Patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What reading a script does with such an option."""

    CHECK = "check"  # a derived number: held against the others
    SAME = "same"  # another option means the same
    DROP = "drop"  # nothing of a plan depends on it
    SHARDING = "sharding"  # DeepSpeed's way to say ZeRO
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Old:
    """How many values stand behind it, what is done with it, and why; `means` are the options that
    say it today."""

    use: Use
    why: str
    values: int = 0
    means: tuple[str, ...] = ()


_DERIVED = "is derived, never given: Megatron-LM takes it from the other sizes; here it is checked"
_PAI = "belongs to Pai-Megatron-Patch; no plan depends on it"

OLD: dict[str, Old] = {
    "--data-parallel-size": Old(use=Use.CHECK, why=_DERIVED, values=1),
    "--gradient-accumulation-steps": Old(use=Use.CHECK, why=_DERIVED, values=1),
    "--use-torch-compile": Old(
        use=Use.DROP,
        why="does not exist: fused elementwise functions are compiled by themselves; graphs of kernels are "
        "--cuda-graph-impl",
    ),
    "--use-fused-kernels": Old(
        use=Use.DROP, why="does not exist: fusions are on unless a --no-...-fusion says otherwise"
    ),
    "--no-async-tensor-model-parallel-allreduce": Old(
        use=Use.DROP,
        why="is gone: --sequence-parallel and --tp-comm-overlap are what overlaps tensor parallelism",
    ),
    "--deepspeed": Old(use=Use.SHARDING, why="is Megatron-DeepSpeed's"),
    "--deepspeed-config": Old(use=Use.SHARDING, why="is Megatron-DeepSpeed's", values=1),
    "--deepspeed_config": Old(use=Use.SHARDING, why="is Megatron-DeepSpeed's", values=1),
    "--zero-stage": Old(use=Use.SHARDING, why="is Megatron-DeepSpeed's", values=1),
    "--profile-step-range": Old(
        use=Use.DROP, why="is --profile --profile-step-start A --profile-step-end B", values=1
    ),
    "--profile-output-path": Old(
        use=Use.DROP, why="is --use-pytorch-profiler with --tensorboard-dir", values=1
    ),
    "--fake-init-process-group": Old(
        use=Use.SAME, why="never existed under this name", means=("--fake-process-group",)
    ),
    "--sequcen-parallel": Old(use=Use.SAME, why="is misspelt", means=("--sequence-parallel",)),
    "--use-custom-fsdp": Old(use=Use.SAME, why="was renamed", means=("--use-megatron-fsdp",)),
    "--moe-extended-tp": Old(
        use=Use.DROP,
        why="is gone: left out, --expert-tensor-parallel-size is the tensor-parallel size, as it said",
    ),
    "--use-legacy-models": Old(
        use=Use.REFUSE, why="is gone, and legacy models with it; leave it out"
    ),
    "--num-experts-per-token": Old(use=Use.REFUSE, why="is --moe-router-topk", values=1),
    "--expert-parallel-size": Old(use=Use.REFUSE, why="is --expert-model-parallel-size", values=1),
    "--no-delay-grad-reduce": Old(use=Use.DROP, why="is gone: --no-align-grad-reduce"),
    "--delay-param-gather": Old(use=Use.DROP, why="is gone: --no-align-param-gather"),
    "--log-batch-size-to-tensorboard": Old(use=Use.DROP, why="is gone: always logged"),
    "--local_rank": Old(
        use=Use.DROP, why="is torch.distributed.launch's; torchrun says it by itself", values=1
    ),
    "--patch-tokenizer-type": Old(use=Use.DROP, why=_PAI, values=1),
    "--extra-vocab-size": Old(use=Use.DROP, why=_PAI, values=1),
    "--max-padding-length": Old(use=Use.DROP, why=_PAI, values=1),
    "--train-mode": Old(use=Use.DROP, why=_PAI, values=1),
    "--dataset": Old(use=Use.DROP, why=_PAI, values=1),
}
