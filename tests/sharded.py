"""State in several shardings, and ranks as threads, for the tests of checkpoints."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moewright.engine.checkpoint import Coordinator, LocalShard, flat_range_shards

T = TypeVar("T")
LAYOUTS = ("rows", "columns", "replicated", "flat")


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Build global tensors of many ranks and dtypes, with -0 and a denormal among the values."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(9, 10, generator=generator)
    weight[0, 0] = -0.0
    weight[8, 9] = 1e-42
    return {
        "layers.3.attention.q.weight": weight,
        "optim/exp_avg/layers.3.attention.q.weight": torch.randn(9, 10, generator=generator),
        "layers.0.moe.experts.gate_up.weight": torch.randn(
            4, 2, 3, 5, generator=generator
        ).bfloat16(),
        "final_norm.weight": torch.randn(7, generator=generator),
        "optim/step": torch.tensor(seed + 41),
        "layers.0.moe.router.frozen": torch.rand(8, generator=generator) > 0.5,
    }


def _split_evenly(extent: int, rank: int, world: int) -> tuple[int, int]:
    """Return the start and the size of a rank's part.

    Parts may be empty, and their sizes differ by at most one.
    """
    start = extent * rank // world
    stop = extent * (rank + 1) // world
    return start, stop - start


def shard_state(
    state: dict[str, torch.Tensor], layout: str, rank: int, world: int
) -> list[LocalShard]:
    """Copy the part of `state` that `rank` holds: a load into the copies leaves `state` alone."""
    shards: list[LocalShard] = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if layout == "flat":
            start, count = _split_evenly(tensor.numel(), rank, world)
            flat = tensor.reshape(-1)[start : start + count].clone()
            origin = (0,) * len(shape)
            shards += flat_range_shards(
                name, global_shape=shape, offsets=origin, local_shape=shape, start=start, flat=flat
            )
            continue
        dim = {"rows": 0, "columns": len(shape) - 1, "replicated": -1}[layout]
        offsets = [0] * len(shape)
        part = tensor
        if shape and dim >= 0:
            offsets[dim], count = _split_evenly(shape[dim], rank, world)
            part = tensor.narrow(dim, offsets[dim], count)
        shards.append(
            LocalShard(name=name, global_shape=shape, offsets=tuple(offsets), tensor=part.clone())
        )
    return shards


def blank_shards(shards: list[LocalShard]) -> list[LocalShard]:
    """Return shards of the same boxes with every byte set to 1."""
    blanks = []
    for shard in shards:
        tensor = torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)
        tensor.reshape(-1).view(torch.uint8).fill_(1)
        blanks.append(
            LocalShard(
                name=shard.name,
                global_shape=shard.global_shape,
                offsets=shard.offsets,
                tensor=tensor,
            )
        )
    return blanks


def shard_bytes(shards: list[LocalShard]) -> list[bytes]:
    """Return the bytes of each shard: NaN equals NaN, and -0 differs from 0."""
    return [
        shard.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for shard in shards
    ]


def run_on_ranks(world: int, function: Callable[[Coordinator], T]) -> list[T | Exception]:
    """Run `function` on ranks, each a thread; return what each of them returned or raised."""
    contributions: list[Any] = [None] * world
    results: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=20)

    def gather_for(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            contributions[rank] = value
            barrier.wait()
            everyone = list(contributions)
            barrier.wait()
            return everyone

        return gather

    def run(rank: int) -> None:
        try:
            results[rank] = function(
                Coordinator(rank=rank, world_size=world, gather=gather_for(rank))
            )
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
