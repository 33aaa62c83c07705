"""A stand-in for nccl.core and nccl.ep, which exchanges over any process group.

It has the calls of their Python interface that the engine makes, in the high-throughput algorithm
with the flat layout, and refuses arguments that the library documents as wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from moewright.engine.comm.collectives import Group as EngineGroup
from moewright.engine.dispatch import ncclep_binding
from stand_in_deep_ep import TokenExchange

_PROCESS_GROUPS: list[dist.ProcessGroup] = []


def install(patch: pytest.MonkeyPatch, *, wrong: float = 0.0) -> None:
    """Make `import nccl.ep` find this module.

    Sums come back with `wrong` added, so that a test can plant an error.
    """
    modules = {}
    for name in ("nccl", "nccl.core", "nccl.ep"):
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, modules[name])
    modules["nccl"].__path__ = []
    modules["nccl.core"].Communicator = Communicator  # type: ignore[attr-defined]
    handle = type("Handle", (Handle,), {"wrong": wrong})
    group = type("Group", (Group,), {"handle_class": handle})
    ep = modules["nccl.ep"]
    for member in (
        Algorithm,
        Layout,
        PassDir,
        ExpertIdKind,
        GroupConfig,
        HandleConfig,
        LayoutInfo,
        DispatchConfig,
        CombineConfig,
        Tensor,
        DispatchInputs,
        DispatchOutputs,
        CombineInputs,
        CombineOutputs,
    ):
        setattr(ep, member.__name__, member)
    ep.Group = group  # type: ignore[attr-defined]
    patch.setattr(ncclep_binding, "communicator_address", address_of)


def address_of(group: EngineGroup, device: torch.device) -> int:
    """Return a number that stands for the communicator of a process group."""
    assert group.handle is not None
    _PROCESS_GROUPS.append(group.handle)
    return len(_PROCESS_GROUPS)


class Communicator:
    def __init__(self, *, ptr: int) -> None:
        self.process_group = _PROCESS_GROUPS[ptr - 1]


Algorithm = Enum("Algorithm", "LOW_LATENCY HIGH_THROUGHPUT")
Layout = Enum("Layout", "EXPERT_MAJOR RANK_MAJOR FLAT")
PassDir = Enum("PassDir", "FWD BWD")
ExpertIdKind = Enum("ExpertIdKind", "AUTO LOCAL GLOBAL")


@dataclass(frozen=True)
class GroupConfig:
    algorithm: Algorithm
    num_experts: int
    max_dispatch_tokens_per_rank: int
    max_recv_tokens_per_rank: int
    max_token_bytes: int


@dataclass(frozen=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


class Tensor:
    def __init__(self, data: torch.Tensor) -> None:
        assert data.is_contiguous()
        self.data = data


@dataclass(frozen=True)
class LayoutInfo:
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(frozen=True)
class DispatchConfig:
    pass_direction: PassDir = PassDir.FWD


@dataclass(frozen=True)
class CombineConfig:
    pass_direction: PassDir = PassDir.FWD


@dataclass(frozen=True)
class DispatchInputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


@dataclass(frozen=True)
class DispatchOutputs:
    tokens: Tensor
    topk_weights: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(frozen=True)
class CombineInputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


@dataclass(frozen=True)
class CombineOutputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


class Group:
    handle_class: type[Handle]

    def __init__(self, communicator: Communicator, config: GroupConfig) -> None:
        assert config.algorithm is Algorithm.HIGH_THROUGHPUT
        assert config.max_recv_tokens_per_rank == 0
        self.process_group = communicator.process_group
        self.config = config

    @classmethod
    def create(cls, communicator: Communicator, config: GroupConfig) -> Group:
        return cls(communicator, config)

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo,
        config: HandleConfig,
        stream: int,
    ) -> Handle:
        assert layout is Layout.FLAT
        assert topk_idx.data.dtype == torch.int64
        assert len(topk_idx.data) <= self.config.max_dispatch_tokens_per_rank
        handle = self.handle_class(self, topk_idx.data)
        assert layout_info.recv_total_counter is not None
        layout_info.recv_total_counter.data.fill_(handle.copies)
        return handle


@dataclass(eq=False)
class Handle:
    """A route, which notes its calls: (call, direction)."""

    wrong = 0.0
    group: Group
    topk_idx: torch.Tensor
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        process_group = self.group.process_group
        ranks = process_group.size()
        self.local = self.group.config.num_experts // ranks
        reaches_rank = torch.stack(
            [(self.topk_idx // self.local == rank).any(1) for rank in range(ranks)], 1
        )
        self.exchange = TokenExchange(reaches_rank, process_group)
        self.copies = int(self.exchange.receive_counts.sum())

    def _note(self, call: str, direction: PassDir) -> None:
        assert ("destroy", "") not in self.calls
        self.calls.append((call, direction.name))

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig,
        stream: int,
    ) -> None:
        self._note("dispatch", config.pass_direction)
        assert inputs.tokens.data.shape[1] * 2 <= self.group.config.max_token_bytes
        outputs.tokens.data.copy_(self.exchange.send(inputs.tokens.data))
        if config.pass_direction is PassDir.BWD:
            assert inputs.topk_weights is outputs.topk_weights is outputs.topk_idx is None
            return
        assert layout_info is not None
        assert layout_info.recv_topk_idx_kind is ExpertIdKind.LOCAL
        assert inputs.topk_weights is not None
        assert outputs.topk_weights is not None
        assert outputs.topk_idx is not None
        rank = self.group.process_group.rank()
        ids = self.exchange.send(self.topk_idx) - rank * self.local
        is_elsewhere = (ids < 0) | (ids >= self.local)
        outputs.topk_idx.data.copy_(ids.masked_fill(is_elsewhere, -1))
        # What stands at the places of other ranks' experts is not documented.
        weights = self.exchange.send(inputs.topk_weights.data)
        outputs.topk_weights.data.copy_(weights.masked_fill(is_elsewhere, torch.nan))

    def combine(
        self,
        inputs: CombineInputs,
        outputs: CombineOutputs,
        *,
        config: CombineConfig,
        stream: int,
    ) -> None:
        self._note("combine", config.pass_direction)
        outputs.tokens.data.copy_(self.exchange.sum_back(inputs.tokens.data) + self.wrong)
        is_backward = config.pass_direction is PassDir.BWD
        assert is_backward == (inputs.topk_weights is not None)
        assert is_backward == (outputs.topk_weights is not None)
        if inputs.topk_weights is not None and outputs.topk_weights is not None:
            outputs.topk_weights.data.copy_(self.exchange.sum_back(inputs.topk_weights.data))

    def destroy(self) -> None:
        self.calls.append(("destroy", ""))
