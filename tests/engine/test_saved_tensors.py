"""What is discarded after a forward is really freed, and is computed again once in backward."""

from __future__ import annotations

import torch

from moewright.engine.memory.saved_tensors import SavedTensorManager, run_checkpointed
from moewright.engine.observe.counters import Counters


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
        with manager.offload_saved(dims=2, enabled=True):
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


def test_a_saved_number_stays_where_it_is() -> None:
    manager = SavedTensorManager(Counters(), replaces_tensors=True)
    scale = torch.tensor(2.0)
    x = torch.randn(4, requires_grad=True)
    with manager.track_forward((0, 0), is_never_resident):
        out = x * scale
    assert out.grad_fn._saved_other.data_ptr() == scale.data_ptr()
