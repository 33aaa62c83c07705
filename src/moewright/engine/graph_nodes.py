"""The nodes of autograd's graph that run the engine's own functions.

torch frees what a node has by `save_for_backward` as soon as its backward has run. Attributes stay,
and what they hold, until the whole backward has ended: the node lives as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from moewright.engine.torch_private import keeps_graph

Backward = Callable[..., Any]


class ReleasingFunction(torch.autograd.Function):
    """An autograd Function whose node has nothing left when its backward has run.

    Every function of the engine is one. Only a graph that is kept for another backward keeps the
    attributes of its nodes, as torch keeps what they have saved.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls).get("backward")
        # A class that inherits its backward is not wrapped a second time.
        if own is not None:
            type.__setattr__(cls, "backward", staticmethod(_release_after(own.__func__)))


def _release_after(backward: Backward) -> Backward:
    """Return a backward after which its node lets go of its attributes."""

    @wraps(backward)
    def run_and_release(ctx: Any, *grads: Any) -> Any:
        input_grads = backward(ctx, *grads)
        if not keeps_graph():
            vars(ctx).clear()
        return input_grads

    return run_and_release
