"""The one place of the engine that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moewright.spec.errors import BadInput, Reason

MAX_WORLD_SIZE = 1_000_000  # beyond any cluster: a number that was mistyped
MAX_PORT = 65535  # TCP's
_TORCHRUN_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables that decide how a product or a sum is rounded, or how NCCL cuts a message, by the
# manuals of CUDA, cuBLAS, oneDNN, MKL, NCCL, PyTorch and Triton. Ranks that differ in one compute
# replicas that differ, or wait for each other for ever.
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
_ADAPTERS = "NCCL_IB_HCA"
# Variables by which a user or an administrator has chosen adapters, or another network, or says
# that /sys does not show this machine's PCI tree.
_ADAPTER_SETTINGS = (
    _ADAPTERS,
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_TOPO_FILE",
)
# The settings of torch's allocator, under all names that torch reads.
_ALLOCATOR_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
_GROWING_SEGMENTS = "expandable_segments:True"
_NCCL_FILES = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))
# Where NCCL looks for a description of a virtual machine's PCI tree.
_VIRTUAL_TOPOLOGY = Path("/var/run/nvidia-topologyd/virtualTopology.xml")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunEnv:
    """The rank that torchrun, or whoever sets its variables, made of this process.

    The ranks meet at `host`:`port`, where rank 0 opens a store unless torchrun has opened one
    (`store_is_open`); `attempt` counts the restarts. `local_world_size` is 0 where nobody set it;
    `machine` is the number of this one.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    store_is_open: bool = False
    attempt: str = "0"
    local_world_size: int = 0
    machine: int = 0


def read_torchrun_env() -> TorchrunEnv | None:
    """Read which rank torchrun made of this process; None where it did not start it.

    Raises:
        BadInput: when only some of the variables are set, or one has no legal value.
    """
    values = {key: os.environ[key] for key in _TORCHRUN_KEYS if key in os.environ}
    if "RANK" not in values or "WORLD_SIZE" not in values:
        _refuse_bare_srun()
        return None
    for key in _TORCHRUN_KEYS:
        if key not in values:
            rule = "is not set, but RANK and WORLD_SIZE are"
            raise BadInput(Reason(field=key, rule=rule, nearest="start by torchrun"))
    rank = _parse_whole_number("RANK", values["RANK"])
    world_size = _parse_whole_number("WORLD_SIZE", values["WORLD_SIZE"])
    local_rank = _parse_whole_number("LOCAL_RANK", values["LOCAL_RANK"])
    port = _parse_whole_number("MASTER_PORT", values["MASTER_PORT"])
    local_world_size = _parse_whole_number(
        "LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "0")
    )
    _require_range("WORLD_SIZE", world_size, 1, MAX_WORLD_SIZE)
    # Port 0 lets the system choose, which a world of one rank may.
    _require_range("MASTER_PORT", port, 0, MAX_PORT)
    if rank >= world_size:
        raise BadInput(
            Reason(
                field="RANK",
                value=values["RANK"],
                rule=f"must be below WORLD_SIZE={values['WORLD_SIZE']}",
                nearest=str(world_size - 1),
            )
        )
    return TorchrunEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=values["MASTER_ADDR"],
        port=port,
        store_is_open=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        local_world_size=local_world_size,
        machine=_parse_whole_number("GROUP_RANK", os.environ.get("GROUP_RANK", "0")),
    )


def read_shared_settings() -> dict[str, str]:
    """Return the variables that are set here and that all ranks need alike."""
    return {key: os.environ[key] for key in _SHARED_SETTINGS if key in os.environ}


def read_device_queues() -> str:
    """Return CUDA_DEVICE_MAX_CONNECTIONS: the hardware queues of a GPU, or nothing where unset."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")


def find_adapter_setting() -> str:
    """Return what has already chosen NCCL's adapters: a variable or a file; nothing if nothing has.

    NCCL takes variables from files too, /etc/nccl.conf and ~/.nccl.conf or $NCCL_CONF_FILE, and a
    variable of the environment would overrule them.
    """
    for name in _ADAPTER_SETTINGS:
        if name in os.environ:
            return name
    own_file = os.environ.get("NCCL_CONF_FILE")
    for path in (_NCCL_FILES[0], Path(own_file) if own_file else _NCCL_FILES[1]):
        file = path.expanduser()
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
        for line in lines:
            if line.partition("=")[0].strip() in _ADAPTER_SETTINGS:
                return f"{line.partition('=')[0].strip()} in {file}"
    return str(_VIRTUAL_TOPOLOGY) if _VIRTUAL_TOPOLOGY.is_file() else ""


def set_adapters(names: Sequence[str]) -> None:
    """Let NCCL open these adapters alone; "=" because it takes names for prefixes otherwise."""
    os.environ[_ADAPTERS] = "=" + ",".join(names)


def set_allocator() -> str:
    """Let torch grow the segments of a GPU's allocator unless a variable sets it; say what it does.

    Segments of fixed sizes leave gaps where tensors of other sizes follow each other, as routed
    rows do (docs.pytorch.org/docs/stable/notes/cuda.html, expandable_segments). The allocator reads
    its settings when it is first used: call this before.
    """
    name = next((name for name in _ALLOCATOR_SETTINGS if name in os.environ), "")
    if name:
        return f"the allocator follows {name}={os.environ[name]}"
    os.environ[_ALLOCATOR_SETTINGS[0]] = _GROWING_SEGMENTS
    return f"the allocator grows its segments ({_ALLOCATOR_SETTINGS[0]}={_GROWING_SEGMENTS})"


def is_triton_interpreted() -> bool:
    """Tell whether Triton's kernels run in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def _refuse_bare_srun() -> None:
    """Refuse several tasks of one srun, each of which would start the whole job."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        rule = "srun started so many tasks, none of which is told its RANK"
        nearest = "srun --ntasks-per-node=1 torchrun (moewright export --to slurm writes it)"
        raise BadInput(
            Reason(field="SLURM_STEP_NUM_TASKS", value=tasks, rule=rule, nearest=nearest)
        )


def _parse_whole_number(key: str, text: str) -> int:
    if not text.isdecimal():
        nearest = "29500" if key == "MASTER_PORT" else "0"
        raise BadInput(
            Reason(field=key, value=text[:60], rule="must be a whole number", nearest=nearest)
        )
    return int(text)


def _require_range(key: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        raise BadInput(
            Reason(
                field=key,
                value=os.environ[key][:60],
                rule=f"must be in {low}..{high}",
                nearest=str(min(max(number, low), high)),
            )
        )
