"""A device whose backward runs on a thread of its own, as a GPU's does: tensors of this machine.

Run as a program (autograd starts the threads of its devices once a process), it runs a pair of
passes on the device and prints what it saw.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from moewright.engine.comm.pass_turns import PassTurns, run_backward_here
from moewright.engine.torch_private import tree_map_only
from moewright.rules.timetable.timetable_row import RowKind

_SEGMENTS = 3


class CardTensor(torch.Tensor):
    """A tensor that says that it lies on the card."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> CardTensor:
        tensor: CardTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device="card:0", requires_grad=requires_grad
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(CardTensor, lambda tensor: tensor.held, (args, kwargs or {}))
        kwargs.pop("device", None)
        return tree_map_only(torch.Tensor, CardTensor, func(*args, **kwargs))


class Segment(torch.autograd.Function):
    """A part of a layer, the backward of which hands over as an exchange does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: PassTurns, threads: list[str]) -> torch.Tensor:
        ctx.turns, ctx.threads = turns, threads
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.threads.append(threading.current_thread().name)
        ctx.turns.pass_turn()
        return 2 * grad, None, None


class Replay(torch.autograd.Function):
    """A part whose backward builds its graph again, and goes through it at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: PassTurns, threads: list[str]) -> torch.Tensor:
        ctx.turns, ctx.threads = turns, threads
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = Segment.apply(x, ctx.turns, ctx.threads)
        torch.autograd.backward(out, grad)
        return x.grad, None, None


def run_alone() -> tuple[list[str], list[float]]:
    """Run a backward on the card; return the threads of its nodes, and the gradient."""
    threads: list[str] = []
    x = CardTensor(torch.ones(3), requires_grad=True)
    out = Segment.apply(x, PassTurns(torch.device("cpu"), ()), threads)
    torch.autograd.backward(out, CardTensor(torch.ones(3)))
    return threads, _read_gradient(x)


def run_pair() -> tuple[list[str], list[float]]:
    """Run a backward beside a forward, each segment of which goes backward on the card too.

    Return the threads of the nodes of both, and the gradient of the backward.
    """
    turns = PassTurns(torch.device("cpu"), ())
    threads: list[str] = []
    others: list[str] = []
    x = CardTensor(torch.ones(3), requires_grad=True)
    out = Segment.apply(Segment.apply(x, turns, threads), turns, threads)
    out = Replay.apply(out, turns, threads)

    def forward() -> None:
        for _ in range(_SEGMENTS):
            others.extend(run_alone()[0])
            turns.pass_turn()

    def backward() -> None:
        torch.autograd.backward(out, CardTensor(torch.ones(3)))

    with run_backward_here():
        turns.run_pair(forward, backward, (RowKind.B, RowKind.F) * (_SEGMENTS + 1))
    return threads + others, _read_gradient(x)


def _read_gradient(x: CardTensor) -> list[float]:
    assert isinstance(x.grad, CardTensor)
    values: list[float] = x.grad.held.tolist()
    return values


def main() -> None:
    """Print the threads and gradients of a backward alone, and of both passes of a pair."""
    _setup_privateuseone_for_python_backend("card")
    for run in (run_alone, run_pair):
        threads, gradient = run()
        print(*threads, *gradient, flush=True)
    os._exit(0)  # the thread of the card cannot be ended


if __name__ == "__main__":
    main()
