"""The micro-batches of a step as one graph that is captured once and replayed (`graphs=full`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moewright.engine.memory.graph_capture import (
    WARMUP_STEPS,
    GraphCapture,
    build_capture,
    build_pool,
    build_stream,
)


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
    capture: GraphCapture
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
            # The graph adds to them.
            for own in captured.tensors.outputs:
                own.zero_()
            captured.capture.replay()
            self.replays += 1
        for own, outer in zip(captured.tensors.outputs, tensors.outputs, strict=True):
            outer.copy_(own)
        return captured.unwritten

    def _capture(self, build: BuildBody) -> _CapturedStep:
        own, body = build()
        capture = build_capture(build_pool(build_stream(self._device)))
        unwritten: list[frozenset[str]] = []
        capture.record(lambda: unwritten.append(body()))
        return _CapturedStep(tensors=own, capture=capture, unwritten=unwritten[0])
