"""Ways to do what a body does, to record it, and to do it again on the same tensors.

On a GPU a CUDA graph is captured: the host launches the work of a body in one call. On a CPU the
list of operations is recorded, and replayed on the same tensors; nothing is gained, but what a
graph asks of a body is asked here too: no number is read by the host, every shape is the same each
time, and what differs from one time to the next lies in tensors. A list that breaks one of these
replays other gradients than the body has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moewright.engine.torch_private import (
    HOST_READ,
    TorchDispatchMode,
    is_view,
    qualified_name,
    storage_id,
    tree_leaves,
    tree_map_only,
)

# Steps that run as they are before one is captured, as Megatron-LM has it: libraries choose their
# kernels and take their workspaces.
WARMUP_STEPS = 3

# Their results have no values to repeat.
_FACTORIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

_MESSAGES = frozenset(("c10d::send", "c10d::recv_"))


class GraphCapture(Protocol):
    """A way to do and record what a body does, and to do it again on the same tensors."""

    def record(self, body: Callable[[], None]) -> None: ...
    def replay(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaPool:
    """Memory that CUDA graphs share, and the stream on which they are captured.

    A backward runs on the stream of its forward, and adds to gradients on the stream of the forward
    that first used a weight: graphs of the same weights are all captured on one.
    """

    handle: Any
    stream: torch.cuda.Stream


class CudaCapture:
    """A capture as a CUDA graph, whose memory lies in a `pool` that it may share with others."""

    def __init__(self, pool: CudaPool) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, body: Callable[[], None]) -> None:
        """Capture the launches of `body`; those of other threads, like NCCL's watch, are let be.

        torch.cuda.graph would also empty the allocator's cache, for each part of each layer twice.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(self._pool.stream):
            self._graph.capture_begin(self._pool.handle, capture_error_mode="thread_local")
            try:
                body()
            finally:
                self._graph.capture_end()
        self.replay()  # to capture is not to run

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation that was recorded, with the tensors that it read and wrote."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]

    @property
    def shapes(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """The name and the shapes of all tensors, by which two lists are compared."""
        tensors = _list_tensors((self.args, self.kwargs, self.results))
        return str(self.function), tuple(tuple(tensor.shape) for tensor in tensors)


class OperationList(TorchDispatchMode):
    """A list of the operations inside, which `replay` runs again.

    On a CPU `tolist` passes no dispatcher; on tensors without data every number that is read does.

    Raises:
        RuntimeError: where the host reads a number of a tensor, which a graph cannot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._made: set[int] = set()  # storages that operations of the list made
        self._received: set[int] = set()  # storages that collectives of the list wrote

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is HOST_READ:
            raise RuntimeError("the host reads a number of a tensor inside a graph")
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # a tensor without data is asked for its device
            return result
        results = tuple(tree_leaves(result))
        if not _is_message(func):  # the body waits for both sides of an exchange
            _wait_for(results)
        arguments = _list_tensors((args, kwargs))
        if func.overloadpacket is torch.ops.aten.copy_ and self._is_late_copy(*arguments):
            return result
        taken = {storage_id(tensor) for tensor in arguments}
        self._made |= {storage_id(tensor) for tensor in _list_tensors(results)} - taken
        if func.namespace == "c10d":
            self._received |= taken
        # Aliases that autograd knows nothing of: it would take a replay for a change of its own.
        args, kwargs = tree_map_only(torch.Tensor, _detach, (args, kwargs))
        results = tree_map_only(torch.Tensor, torch.Tensor.detach, results)
        self.operations.append(Operation(function=func, args=args, kwargs=kwargs, results=results))
        return result

    def _is_late_copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Tell a copy that gloo makes of its own sum as a collective is waited for.

        It belongs to the collective, which makes it again.
        """
        is_own = storage_id(source) not in self._made | self._received
        return is_own and storage_id(target) in self._received

    def record(self, body: Callable[[], None]) -> None:
        """Run `body` and record it."""
        with self:
            body()

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again; a result that is a tensor of its own is copied to where it was.

        A collective is waited for at once, messages when those that follow each other are under
        way: the other side waits for them too.
        """
        messages: list[Any] = []
        for operation in self.operations:
            if operation.function.overloadpacket in _FACTORIES:
                continue
            is_message = _is_message(operation.function)
            if not is_message:
                _wait_for(messages)
                messages.clear()
            results = tree_leaves(operation.function(*operation.args, **operation.kwargs))
            if is_message:
                messages += results
                continue
            _wait_for(results)
            arguments = _list_tensors((operation.args, operation.kwargs))
            taken = {storage_id(tensor) for tensor in arguments}
            for old, new in zip(operation.results, results, strict=True):
                is_tensor = isinstance(new, torch.Tensor)
                if is_tensor and storage_id(old) not in taken:
                    old.copy_(new)
        _wait_for(messages)


def build_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream on which CUDA graphs are captured; a CPU has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def build_pool(stream: torch.cuda.Stream | None) -> CudaPool | None:
    """Return memory of its own for graphs that are captured on a stream; None without one."""
    if stream is None:
        return None
    return CudaPool(handle=torch.cuda.graph_pool_handle(), stream=stream)


def build_capture(pool: CudaPool | None) -> GraphCapture:
    """Build a capture as a CUDA graph in a pool; without one as a list of operations."""
    return OperationList() if pool is None else CudaCapture(pool)


def _is_message(function: Any) -> bool:
    """Tell a message between two ranks from a collective."""
    return function.namespace == "c10d" and qualified_name(function) in _MESSAGES


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor that autograd knows; numbers that have become tensors it never.

    Those have data even where no other tensor has.
    """
    return tensor.detach() if tensor.requires_grad or is_view(tensor) else tensor


def _wait_for(results: Iterable[Any]) -> None:
    """Wait for the collectives among the results of an operation."""
    for result in results:
        if not isinstance(result, torch.Tensor) and hasattr(result, "wait"):
            result.wait()


def _list_tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
