"""What must hold on this machine and between ranks before a job trains."""

from __future__ import annotations

from pathlib import Path

import torch

from moewright.engine.checkpoint import Coordinator
from moewright.engine.kernels.fused.table import implementation_name
from moewright.engine.run.env import read_shared_settings, read_torchrun_env
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan
from moewright.version import __version__


def missing_devices(plan: Plan) -> tuple[Reason, ...]:
    """Return a reason where fewer GPUs are here than ranks start here; else nothing."""
    if not plan.hardware.device.kind.runs_cuda:
        return ()
    needed = _count_local_ranks(plan)
    available = torch.cuda.device_count()
    if available >= needed:
        return ()
    rule = f"needs {needed} CUDA devices on this machine, which has {available}"
    if available:
        field = "train.nproc"
        nearest = str(available)
    else:
        field = "train.hardware"
        nearest = "the .toml of `moewright bench machine`"
    return (Reason(field=field, value=plan.hardware.name, rule=rule, nearest=nearest),)


def refuse_peer_copies(plan: Plan) -> tuple[Reason, ...]:
    """Return a reason where the job asks for copies that would be of no use; else nothing.

    Ranks of GPUs that wait in NCCL for one that has died do not notice it.
    """
    steps = plan.workload.checkpoint.peer_every_steps
    if not steps or not plan.hardware.device.kind.runs_cuda:
        return ()
    field = "checkpoint.peer_every_steps"
    rule = "ranks go on in place on CPUs alone; on GPUs all start again"
    return (Reason(field=field, value=str(steps), rule=rule, nearest="0"),)


# What the engine makes as folders in the folder of a run.
_FOLDERS = ("checkpoints", "ledger", "trace", ".launch")


def refuse_run_folder(run_dir: Path) -> tuple[Reason, ...]:
    """Return reasons where a run cannot be kept in a folder; else nothing."""
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        rule = "its name is not text in UTF-8, or not in this locale"
        nearest = "another name, or PYTHONUTF8=1"
        return (Reason(field="--out", value=ascii(str(run_dir)), rule=rule, nearest=nearest),)
    paths = [run_dir / name for name in _FOLDERS]
    return tuple(
        Reason(field=str(path), rule="is a file, not a directory", nearest="delete it")
        for path in paths
        if path.exists() and not path.is_dir()
    )


def _count_local_ranks(plan: Plan) -> int:
    env = read_torchrun_env()
    if env is None:
        return plan.layout.world_size
    # Without it this rank knows only that those before it are here.
    return env.local_world_size or env.local_rank + 1


def describe_device_queues(layout: Layout, kind: DeviceKind, queues: str) -> str:
    """Return what to set where a GPU's queues let products overtake the collectives before them.

    With one queue kernels start in the order of their launches (up to Hopper), so that a collective
    that was started first has its part of the device before the products that hide it. Nothing
    where that changes nothing.
    """
    hides = layout.tp > 1 or layout.cp > 1 or bool(layout.overlap)
    if kind is not DeviceKind.CUDA or not hides or queues == "1":
        return ""
    setting = queues or "unset"
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS is {setting}: up to Hopper, set it to 1, or products may "
        "overtake the collectives that they are to hide"
    )


def refuse_different_ranks(plan: Plan, comm: Coordinator) -> None:
    """Refuse a job whose ranks have different plans, code or settings.

    They would train different models. Every rank of the world calls this.

    Raises:
        BadInput: on every rank that differs from another one.
    """
    own = {
        "plan": plan.fingerprint,
        "moewright": __version__,
        "torch": torch.__version__,
        "fused_kernels": implementation_name(
            plan.workload.fused_kernels, plan.hardware.device.kind
        ),
        **read_shared_settings(),
    }
    for rank, other in enumerate(comm.gather(own)):
        for field in dict.fromkeys((*own, *other)):
            own_value = own.get(field, "none")
            other_value = other.get(field, "none")
            if own_value != other_value:
                rule = (
                    f"rank {rank} has {other_value}, rank {comm.rank} has {own_value}; "
                    "all ranks need the same"
                )
                raise BadInput(Reason(field=field, rule=rule))
