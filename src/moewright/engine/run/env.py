"""The one place of the engine that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moewright.spec.errors import BadInput, Reason

MAX_WORLD_SIZE, MAX_PORT = 1_000_000, 65535
_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What decides how a product or a sum is rounded, or how NCCL cuts a message, by the manuals of
# CUDA, cuBLAS, oneDNN,
# MKL, NCCL, PyTorch and Triton. Ranks that differ in one compute copies that differ, or wait for
# each other for ever.
_SHARED_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunEnv:
    """This process as torchrun, or whoever sets its variables, started it. The ranks meet at
    `host`:`port`, where rank 0 opens a store unless torchrun has one there (`store_open`);
    `attempt` counts its restarts. `local_world` is 0 where nobody said.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    store_is_open: bool = False
    attempt: str = "0"
    local_world_size: int = 0


def read_torchrun_env() -> TorchrunEnv | None:
    """The rank that torchrun made of this process, or None. Raises BadInput when only some
    variables are there."""
    given = {key: os.environ[key] for key in _KEYS if key in os.environ}
    if "RANK" not in given or "WORLD_SIZE" not in given:
        _refuse_bare_srun()
        return None
    for key in _KEYS:
        if key not in given:
            raise BadInput(
                Reason(
                    field=key,
                    rule="is not set, but RANK and WORLD_SIZE are",
                    nearest="start by torchrun",
                )
            )
    numbers = {
        key: _parse_whole_number(key, given[key])
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    local_world = _parse_whole_number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "0"))
    # Port 0 lets the system choose, which a world of one may.
    for key, low, high in (("WORLD_SIZE", 1, MAX_WORLD_SIZE), ("MASTER_PORT", 0, MAX_PORT)):
        if not low <= numbers[key] <= high:
            close = str(min(max(numbers[key], low), high))
            raise BadInput(
                Reason(
                    field=key,
                    value=given[key][:60],
                    rule=f"must be in {low}..{high}",
                    nearest=close,
                )
            )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise BadInput(
            Reason(
                field="RANK",
                value=given["RANK"],
                rule=f"must be below WORLD_SIZE={given['WORLD_SIZE']}",
                nearest=str(numbers["WORLD_SIZE"] - 1),
            )
        )
    return TorchrunEnv(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        host=given["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        store_is_open=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        local_world_size=local_world,
    )


def read_shared_settings() -> dict[str, str]:
    """Variables that are set here and that all ranks need alike."""
    return {key: os.environ[key] for key in _SHARED_SETTINGS if key in os.environ}


def _refuse_bare_srun() -> None:
    """Each of several tasks of one srun would start the whole job."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        rule = "srun started so many tasks, none of which is told its RANK"
        nearest = "srun --ntasks-per-node=1 torchrun (moewright export --to slurm writes it)"
        raise BadInput(
            Reason(field="SLURM_STEP_NUM_TASKS", value=tasks, rule=rule, nearest=nearest)
        )


def _parse_whole_number(key: str, text: str) -> int:
    if not text.isdecimal():
        close = "29500" if key == "MASTER_PORT" else "0"
        raise BadInput(
            Reason(field=key, value=text[:60], rule="must be a whole number", nearest=close)
        )
    return int(text)


def is_triton_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"
