"""What is discarded after a forward is really freed, and is computed again once in backward."""

from __future__ import annotations

import pytest
import torch

from moewright.engine.memory import saved_tensors
from moewright.engine.memory.host_copies import PlainCopies
from moewright.engine.memory.saved_tensors import SavedTensorManager, run_checkpointed
from moewright.engine.observe.counters import Counters
from moewright.spec.ledger import Component


def is_never_resident(tensor: torch.Tensor) -> bool:
    return False


def is_freed(weak_storage: int) -> bool:
    return bool(torch.UntypedStorage._expired(weak_storage))


def test_a_discarded_tensor_is_freed_and_made_once_for_all_that_kept_it() -> None:
    sources = []
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def double(source: torch.Tensor) -> torch.Tensor:
        sources.append(source.data_ptr())
        return source * 2

    with manager.track_forward((0, 0), is_never_resident):
        y = double(x)
        with manager.discard_and_recompute(y, double, x, enabled=True):
            out = (y * w).sum() + (y[2:, 1:].transpose(0, 1) @ y[2:, :1]).sum()
        weak_storage = y.untyped_storage()._weak_ref()
        del y
    assert is_freed(weak_storage)
    out.backward()
    assert sources == [x.data_ptr()] * 2

    gradient = x.grad
    x.grad = None
    y = x * 2
    ((y * w).sum() + (y[2:, 1:].transpose(0, 1) @ y[2:, :1]).sum()).backward()
    assert torch.equal(gradient, x.grad)


def test_nothing_is_discarded_unless_enabled_nor_outside_the_forward() -> None:
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    x = torch.randn(4, requires_grad=True)
    for enabled, inside in ((False, True), (True, False)):
        y = x.exp()
        if inside:
            with (
                manager.track_forward((0, 0), is_never_resident),
                manager.discard_and_recompute(y, torch.exp, x, enabled=enabled),
            ):
                out = (y * y).sum()
        else:
            with manager.discard_and_recompute(y, torch.exp, x, enabled=enabled):
                out = (y * y).sum()
        weak_storage = y.untyped_storage()._weak_ref()
        del y
        assert not is_freed(weak_storage)
        out.backward()


def test_a_checkpointed_block_keeps_its_inputs_alone() -> None:
    storages: list[int] = []

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.exp()
        if not torch.is_grad_enabled():
            storages.append(inner.untyped_storage()._weak_ref())
        return inner * inner, torch.ones(2, dtype=torch.int64)

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    with manager.track_forward((0, 0), is_never_resident):
        out, counts = run_checkpointed(Counters(), block, x)
    assert is_freed(storages[0])
    assert not counts.requires_grad
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.exp(2 * x.detach()))


def test_an_offloaded_tensor_leaves_and_comes_back_once_for_all() -> None:
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    x = torch.randn(8, 4, requires_grad=True)
    with manager.track_forward((0, 0), is_never_resident):
        y = x.exp()
        with manager.offload(y, enabled=True):
            out = (y * y[:, :1]).sum() + (y[2:].T @ y[2:]).sum()
        original = y.detach().clone()
        weak_storage = y.untyped_storage()._weak_ref()
        with manager.offload_saved(dims=2, staying=(), enabled=True):
            z = out * x.sigmoid()
            weak_sum = z.untyped_storage()._weak_ref()
            z = z.tanh()
            squared = z * z
        del y, z
    # exp saves its own result outside of the scope; tanh's lies on the host alone.
    assert not is_freed(weak_storage)
    assert is_freed(weak_sum)
    (squared.sum() + out).backward()
    gradient = x.grad
    x.grad = None
    y = x.exp()
    out = (y * y[:, :1]).sum() + (y[2:].T @ y[2:]).sum()
    (torch.tanh(out * x.sigmoid()).square().sum() + out).backward()
    assert torch.equal(y.detach(), original)
    torch.testing.assert_close(gradient, x.grad)


class NotedCopies(PlainCopies):
    """Copies that note what they do, each tensor by its first number."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def start_fetch(self, copied: torch.Tensor) -> tuple[torch.Tensor, None]:
        self._events.append(f"fetch {copied[0]:.0f}")
        return super().start_fetch(copied)

    def finish_fetch(self, fetched: tuple[torch.Tensor, None]) -> torch.Tensor:
        self._events.append(f"use {fetched[0][0]:.0f}")
        return super().finish_fetch(fetched)


def test_what_lies_on_the_host_is_fetched_before_the_backward_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer's before the backward begins, each other one's a layer ahead of its use."""
    events: list[str] = []
    monkeypatch.setattr(saved_tensors, "build_host_copies", lambda device: NotedCopies(events))
    counters = Counters()
    manager = SavedTensorManager(counters, replaces_tensors=True)
    x = torch.zeros(4, requires_grad=True)
    outputs = {}
    for key in ((0, 0), (1, 0)):
        with manager.track_forward(key, is_never_resident):
            y = x
            for layer in (1, 2, 3):
                with counters.scopes.in_layer(layer):
                    for part in (1, 2):
                        kept = torch.full((4,), 100.0 * key[0] + 10 * layer + part)
                        with manager.offload(kept, enabled=True):
                            y = y * kept
        outputs[key] = y
    assert not events
    for key, name in (((0, 0), ""), ((1, 0), "1")):
        manager.fetch_last_layer(key)
        assert events == [f"fetch {name}32", f"fetch {name}31"]
        outputs[key].sum().backward()
        assert events == [
            *(f"fetch {name}{number}" for number in (32, 31)),
            *(f"fetch {name}{number}" for number in (22, 21)),
            *(f"use {name}{number}" for number in (32, 31)),
            *(f"fetch {name}{number}" for number in (12, 11)),
            *(f"use {name}{number}" for number in (22, 21, 12, 11)),
        ]
        events.clear()


def test_a_whole_chunk_is_fetched_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Last layer first; what has come back is kept for the chunk until its backward has used it."""
    events: list[str] = []
    monkeypatch.setattr(saved_tensors, "build_host_copies", lambda device: NotedCopies(events))
    counters = Counters()
    manager = SavedTensorManager(counters, replaces_tensors=True)
    x = torch.zeros(4, requires_grad=True)
    with counters.counting():
        with manager.track_forward((0, 0), is_never_resident):
            y = x
            for layer in (1, 2):
                with counters.scopes.in_layer(layer):
                    kept = torch.full((4,), float(layer))
                    with manager.offload(kept, enabled=True):
                        y = y * kept
        manager.fetch_chunk((0, 0))
        assert events == ["fetch 2", "fetch 1"]
        manager.fetch_last_layer((0, 0))  # nothing is left
        y.sum().backward()
        counters.release((0, 0))
    assert events == ["fetch 2", "fetch 1", "use 2", "use 1"]
    ledger = counters.build_ledger(rank=0, pp_rank=0, state=(), time=(), notes=())
    saved = sum(row.bytes for row in ledger.memory if row.component is Component.ACTIVATIONS)
    assert saved == 2 * 16


def test_a_saved_number_stays_where_it_is() -> None:
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    scale = torch.tensor(2.0)
    x = torch.randn(4, requires_grad=True)
    with manager.track_forward((0, 0), is_never_resident):
        out = x * scale
    assert out.grad_fn._saved_other.data_ptr() == scale.data_ptr()
