"""The calls that the engine makes of NCCL-EP, and what it makes of their tensors."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

import stand_in_nccl_ep
from moewright.engine.comm.autograd_collectives import all_to_all_in_turn
from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch import ncclep_binding
from moewright.engine.dispatch.deepep import DeepEpDispatcher
from moewright.engine.dispatch.interface import LibrarySizes
from moewright.engine.dispatch.ncclep_binding import NcclEp
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.observe.counters import Counters

EXPERTS, HIDDEN, TOKENS = 4, 8, 6


class LocalExchange:
    """The exchange of a group of one rank: a token that has an expert stays where it is."""

    def __init__(self, reaches_rank: torch.Tensor, group: object) -> None:
        self.stays = reaches_rank[:, 0]
        self.receive_counts = self.stays.sum()[None]

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.stays]

    def sum_back(self, rows: torch.Tensor) -> torch.Tensor:
        sums = rows.new_zeros((len(self.stays), *rows.shape[1:]))
        sums[self.stays] = rows
        return sums


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> NcclEp:
    stand_in_nccl_ep.install(monkeypatch)
    process_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(stand_in_nccl_ep, "_PROCESS_GROUPS", [process_group])
    monkeypatch.setattr(ncclep_binding, "communicator_address", lambda group, device: 1)
    monkeypatch.setattr(stand_in_nccl_ep, "TokenExchange", LocalExchange)
    group = Group(name="ep", ranks=(0,), index=0, handle=None, counters=Counters())
    device = torch.device("cpu")
    sizes = LibrarySizes(experts=EXPERTS, hidden=HIDDEN, max_tokens=TOKENS, nvlink_domain_size=1)
    return NcclEp(group, sizes, device)


def test_a_layer_dispatches_and_combines_in_both_directions_along_one_route(
    library: NcclEp,
) -> None:
    """Each token has its expert's number times its weight; the last has a dropped slot."""
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    experts = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3], [2, EXPERTS]])
    weights = torch.rand(TOKENS, 2)
    weights[-1, 1] = 0.0
    weights.requires_grad_()
    dispatcher = DeepEpDispatcher(library, EXPERTS, torch_kernels())
    routed, route = dispatcher.preprocess(x, experts, weights)
    routed = dispatcher.dispatch(routed, route, all_to_all_in_turn)
    handle = route.handle.handle
    routed = dispatcher.postprocess(routed, route)
    numbers = torch.arange(len(routed.rows), dtype=torch.int32)
    factor = 1 + torch.searchsorted(route.expert_ends, numbers, right=True)
    rows = routed.rows * (routed.weights * factor)[:, None]
    rows = dispatcher.combine_preprocess(rows, route)
    out = dispatcher.combine(rows, route, all_to_all_in_turn)
    scale = (weights * torch.where(experts < EXPERTS, experts + 1, 0)).sum(1)
    assert torch.allclose(out, x * scale[:, None], atol=1e-6)

    gradient = torch.randn_like(out)
    expected = torch.autograd.grad(x * scale[:, None], (x, weights), gradient)
    actual = torch.autograd.grad(out, (x, weights), gradient)
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)
    assert handle.calls == [
        ("dispatch", "FWD"),
        ("combine", "FWD"),
        ("dispatch", "BWD"),
        ("combine", "BWD"),
    ]
    del route, routed, rows, out, dispatcher
    gc.collect()
    assert handle.calls[-1] == ("destroy", "")
