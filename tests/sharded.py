"""Small state in several shardings, and ranks as threads: what checkpoint tests save and load."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moewright.engine.checkpoint import Coordinator, LocalShard, flat_range_shards

T = TypeVar("T")
LAYOUTS = ("rows", "columns", "replicated", "flat")


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Global tensors of many ranks and dtypes, with NaN and infinity among the values."""
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(9, 10, generator=make)
    weight[0, 0], weight[8, 9] = float("nan"), float("inf")
    return {
        "layers.3.attention.q.weight": weight,
        "optim/exp_avg/layers.3.attention.q.weight": torch.randn(9, 10, generator=make),
        "layers.0.moe.experts.gate_up.weight": torch.randn(4, 2, 3, 5, generator=make).bfloat16(),
        "final_norm.weight": torch.randn(7, generator=make),
        "optim/step": torch.tensor(seed + 41),
        "layers.0.moe.router.frozen": torch.rand(8, generator=make) > 0.5,
    }


def _share(extent: int, rank: int, world: int) -> tuple[int, int]:
    """Start and size of a rank's part; parts may be empty and differ by one."""
    start, stop = extent * rank // world, extent * (rank + 1) // world
    return start, stop - start


def shard_state(
    state: dict[str, torch.Tensor], layout: str, rank: int, world: int
) -> list[LocalShard]:
    """What `rank` holds of `state`, as copies: a load into them leaves `state` alone."""
    pieces: list[LocalShard] = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if layout == "flat":
            start, count = _share(tensor.numel(), rank, world)
            flat = tensor.reshape(-1)[start : start + count].clone()
            origin = (0,) * len(shape)
            pieces += flat_range_shards(
                name, global_shape=shape, offsets=origin, local_shape=shape, start=start, flat=flat
            )
            continue
        dim = {"rows": 0, "columns": len(shape) - 1, "replicated": -1}[layout]
        offsets, part = [0] * len(shape), tensor
        if shape and dim >= 0:
            offsets[dim], count = _share(shape[dim], rank, world)
            part = tensor.narrow(dim, offsets[dim], count)
        pieces.append(
            LocalShard(name=name, global_shape=shape, offsets=tuple(offsets), tensor=part.clone())
        )
    return pieces


def blank_shards(pieces: list[LocalShard]) -> list[LocalShard]:
    """The same boxes, with every byte set."""
    made = []
    for piece in pieces:
        tensor = torch.empty_like(piece.tensor, memory_format=torch.contiguous_format)
        tensor.reshape(-1).view(torch.uint8).fill_(1)
        made.append(
            LocalShard(
                name=piece.name,
                global_shape=piece.global_shape,
                offsets=piece.offsets,
                tensor=tensor,
            )
        )
    return made


def shard_bytes(pieces: list[LocalShard]) -> list[bytes]:
    """The bytes of each piece: NaN equals NaN, -0 differs from 0."""
    return [
        piece.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for piece in pieces
    ]


def run_on_ranks(world: int, work: Callable[[Coordinator], T]) -> list[T | Exception]:
    """Run `work` on `world` ranks, each a thread, and return what each gave or raised."""
    table: list[Any] = [None] * world
    results: list[Any] = [None] * world
    meet = threading.Barrier(world, timeout=20)

    def gather_for(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            table[rank] = value
            meet.wait()
            seen = list(table)
            meet.wait()
            return seen

        return gather

    def run(rank: int) -> None:
        try:
            results[rank] = work(Coordinator(rank=rank, world_size=world, gather=gather_for(rank)))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
