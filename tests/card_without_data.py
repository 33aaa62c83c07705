"""Steps of jobs on a card without data: what lies where, and what passes between host and card.

A card is a device of torch's own name for those that are no CPU, and its tensors have no data. Each
operation is refused whose tensors do not lie on one device, as a GPU refuses it; numbers that the
host reads, and copies from one memory to the other, are told with the functions that ask for them.

Run as a program, since a process has one such device: it prints the draws that fail, and which
functions read or copied.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from job_draws import draw_job
from moewright.engine.comm import collectives
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory import saved_tensors
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.dry_run import _BlankBatches, _uninitialized
from moewright.engine.run.step import train_step
from moewright.engine.torch_private import (
    DEVICE_QUESTION,
    HOST_READ,
    FakeTensorMode,
    TorchDispatchMode,
)
from moewright.rules.job import Job
from moewright.spec.workload import Dtype

CARD = "card"
_PACKAGE = "/moewright/"


class CardTensors(FakeTensorMode):
    """Tensors without data, on a card that no driver knows."""

    avoid_device_init = True  # type: ignore[assignment]  # or a number of Python would go there


class HostTraffic(TorchDispatchMode):
    """What the host reads of the card, which is 1, and what is copied between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUESTION:
            return args[0].device
        if func.overloadpacket is HOST_READ:
            if args[0].device.type == CARD:
                self.sites[f"read: {_find_caller()}"] += 1
            return 1
        result = func(*args, **(kwargs or {}))
        source = {"_to_copy": 0, "copy_": 1}.get(func.overloadpacket.__name__)
        if source is not None and args[source].device.type != result.device.type:
            way = "to the card" if result.device.type == CARD else "from the card"
            self.sites[f"{way}: {_find_caller()}"] += 1
        return result


def _find_caller() -> str:
    """Return the function of the engine that runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "a backward"
    name = frame.f_code.co_filename.rpartition(_PACKAGE)[2].removesuffix(".py")
    return f"{name}.{frame.f_code.co_name}"


class _CardCopies:
    """Copies to the host and back, as engine.memory.host_copies makes those of a GPU."""

    def start_copy(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(flat, device="cpu").copy_(flat)

    def start_fetch(self, copied: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copied.to(CARD), None

    def finish_fetch(self, fetched: tuple[torch.Tensor, None]) -> torch.Tensor:
        return fetched[0]


class _Stream:
    def synchronize(self) -> None:
        pass


def _build_generator(generator: type[torch.Generator], device: torch.device) -> torch.Generator:
    return generator("cpu")


def set_up_card() -> None:
    """Make the device known to torch, to the fake world and to the engine."""
    _setup_privateuseone_for_python_backend(CARD)
    dist.Backend.backend_capability["fake"].append(CARD)
    dist.Backend.default_device_backend_map[CARD] = "fake"
    vars(saved_tensors)["build_host_copies"] = lambda device: _CardCopies()
    # It draws on the host, for no number is drawn.
    torch.Generator = partial(_build_generator, torch.Generator)  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment, return-value]


def run_on_card(job: Job, rank: int) -> Counter[str]:
    """Run a step of a rank, and return what passed between host and card in it."""
    if job.layout.world_size > 1:
        collectives.join_fake_world(rank=rank, world_size=job.layout.world_size)
    traffic = HostTraffic()
    try:
        with CardTensors(), traffic:
            state = build_train_state(
                job,
                _BlankBatches(),
                rank=rank,
                device=torch.device(CARD, 0),
                initial_value=lambda parameter, runtime: _uninitialized(parameter),
                kernels=torch_kernels(),
            )
            traffic.sites.clear()
            train_step(state, step=1, lr=0.0, stop_requested=False, count_ledger=False)
    finally:
        collectives.leave_world()
    return traffic.sites


def run_draw(seed: str) -> Counter[str]:
    """Run the draw of a seed in 16 bits or fewer: torch groups no fp32 products without data."""
    draw = draw_job(seed, worlds=(1, 2, 4, 8), is_counted_dry=True)
    workload = draw.job.workload
    if not workload.precision.is_narrow:
        workload = replace(workload, precision=Dtype.BF16)
    try:
        return run_on_card(replace(draw.job, workload=workload), rank=0)
    except Exception:
        print(draw, file=sys.stderr)
        traceback.print_exc()
        return Counter({f"failed: {seed}": 1})


def main() -> None:
    """Run the draws of the seeds, and print what passed between host and card."""
    set_up_card()
    sites: Counter[str] = Counter()
    for seed in sys.argv[1:]:
        sites += run_draw(seed)
    print(json.dumps(sites))


if __name__ == "__main__":
    main()
