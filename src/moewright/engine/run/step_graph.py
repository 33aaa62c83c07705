"""The micro-batches of a step as one graph that is captured once and replayed (`graphs=full`).

On a GPU a CUDA graph is captured: the host launches a step's work in one call. On a CPU the list of
operations is recorded, and replayed on the same tensors; nothing is gained, but what a graph asks
of a step is asked here too: no number is read by the host, every shape is the same in every step,
and what differs from step to step lies in tensors. A list that breaks one of these replays other
gradients than the step has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moewright.engine.observe.storage_census import storage_id

# Steps that run as they are before one is captured, as Megatron-LM has it: libraries choose their
# kernels and take their workspaces.
WARMUP_STEPS = 3

# Their results have no values to repeat.
_FACTORIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class StepCapture(Protocol):
    """A way to do and record what a body does, and to do it again on the same tensors."""

    def record(self, body: Callable[[], None]) -> None: ...
    def replay(self) -> None: ...


class CudaCapture:
    """A capture as a CUDA graph."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, body: Callable[[], None]) -> None:
        """Capture the launches of `body`; those of other threads, like NCCL's watch, are let be."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            body()
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
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RuntimeError("the host reads a number of a tensor inside a step's graph")
        result = func(*args, **kwargs)
        results = tuple(tree_leaves(result))
        _wait_for(results)
        arguments = _list_tensors((args, kwargs))
        if func.overloadpacket is torch.ops.aten.copy_ and self._is_late_copy(*arguments):
            return result
        taken = {storage_id(tensor) for tensor in arguments}
        self._made |= {storage_id(tensor) for tensor in _list_tensors(results)} - taken
        if func.namespace == "c10d":
            self._received |= taken
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

        A collective is waited for at once.
        """
        for operation in self.operations:
            if operation.function.overloadpacket in _FACTORIES:
                continue
            results = tree_leaves(operation.function(*operation.args, **operation.kwargs))
            _wait_for(results)
            arguments = _list_tensors((operation.args, operation.kwargs))
            taken = {storage_id(tensor) for tensor in arguments}
            for old, new in zip(operation.results, results, strict=True):
                is_tensor = isinstance(new, torch.Tensor)
                if is_tensor and storage_id(old) not in taken:
                    old.copy_(new)


def _wait_for(results: Iterable[Any]) -> None:
    """Wait for the collectives among the results of an operation."""
    for result in results:
        if not isinstance(result, torch.Tensor) and hasattr(result, "wait"):
            result.wait()


def _list_tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTensors:
    """The tensors by which a step enters its graph and leaves it.

    `outputs` are sums, which are zero at the beginning.
    """

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _CapturedStep:
    tensors: GraphTensors
    capture: StepCapture
    unwritten: frozenset[str]


# Builds the work of a step on tensors of its own: these, with the inputs of now, and what runs it.
# That returns the names of the parameters that got no gradient.
BuildBody = Callable[[], tuple[GraphTensors, Callable[[], frozenset[str]]]]


class StepGraph:
    """The graphs of a rank: one for each number of micro-batches, which a batch ramp changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[int, _CapturedStep] = {}
        self._steps: dict[int, int] = {}
        self.replays = 0

    def is_warm(self, micro_batches: int) -> bool:
        """Count a step of so many micro-batches; tell whether enough have run as they are."""
        self._steps[micro_batches] = self._steps.get(micro_batches, 0) + 1
        return self._steps[micro_batches] > WARMUP_STEPS

    def run(self, micro_batches: int, tensors: GraphTensors, build: BuildBody) -> frozenset[str]:
        """Replay the graph of a step on `tensors`, which is captured when first asked for.

        Return the names of the parameters that get no gradient.
        """
        captured = self._captured.get(micro_batches)
        if captured is None:
            captured = self._capture(build)
            self._captured[micro_batches] = captured
        else:
            for own, outer in zip(captured.tensors.inputs, tensors.inputs, strict=True):
                own.copy_(outer)
            for own in captured.tensors.outputs:
                own.zero_()
            captured.capture.replay()
            self.replays += 1
        for own, outer in zip(captured.tensors.outputs, tensors.outputs, strict=True):
            outer.copy_(own)
        return captured.unwritten

    def _capture(self, build: BuildBody) -> _CapturedStep:
        own, body = build()
        capture: StepCapture = CudaCapture() if self._device.type == "cuda" else OperationList()
        unwritten: list[frozenset[str]] = []
        capture.record(lambda: unwritten.append(body()))
        return _CapturedStep(tensors=own, capture=capture, unwritten=unwritten[0])
