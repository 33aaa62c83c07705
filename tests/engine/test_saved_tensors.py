"""What is let go of after a forward is really gone, and is made again once in backward."""

from __future__ import annotations

import torch

from moewright.engine.memory.saved_tensors import SavedTensorManager, run_checkpointed
from moewright.engine.observe.counters import Counters


def nothing_resident(tensor: torch.Tensor) -> bool:
    return False


def gone(weak: int) -> bool:
    return bool(torch.UntypedStorage._expired(weak))


def test_a_discarded_tensor_is_freed_and_made_once_for_all_that_kept_it() -> None:
    books, made = Counters(), []
    keeper = SavedTensorManager(books, replaces_tensors=True)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def make(source: torch.Tensor) -> torch.Tensor:
        made.append(source.data_ptr())
        return source * 2

    with keeper.track_forward((0, 0), nothing_resident):
        y = make(x)
        with keeper.discard_and_recompute(y, make, x, enabled=True):
            out = (y * w).sum() + (y[2:, 1:].transpose(0, 1) @ y[2:, :1]).sum()
        weak = y.untyped_storage()._weak_ref()
        del y
    assert gone(weak)
    out.backward()
    assert made == [x.data_ptr()] * 2

    found, x.grad = x.grad, None
    y = x * 2
    ((y * w).sum() + (y[2:, 1:].transpose(0, 1) @ y[2:, :1]).sum()).backward()
    assert torch.equal(found, x.grad)


def test_nothing_is_discarded_unless_asked_nor_outside_the_forward() -> None:
    keeper = SavedTensorManager(Counters(), replaces_tensors=True)
    x = torch.randn(4, requires_grad=True)
    for asked, inside in ((False, True), (True, False)):
        y = x.exp()
        if inside:
            with (
                keeper.track_forward((0, 0), nothing_resident),
                keeper.discard_and_recompute(y, torch.exp, x, enabled=asked),
            ):
                out = (y * y).sum()
        else:
            with keeper.discard_and_recompute(y, torch.exp, x, enabled=asked):
                out = (y * y).sum()
        weak = y.untyped_storage()._weak_ref()
        del y
        assert not gone(weak)
        out.backward()


def test_a_replayed_block_keeps_its_inputs_alone() -> None:
    storages: list[int] = []

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.exp()
        if not torch.is_grad_enabled():
            storages.append(inner.untyped_storage()._weak_ref())
        return inner * inner, torch.ones(2, dtype=torch.int64)

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with SavedTensorManager(Counters(), replaces_tensors=True).track_forward(
        (0, 0), nothing_resident
    ):
        out, counts = run_checkpointed(Counters(), block, x)
    assert gone(storages[0])
    assert not counts.requires_grad
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.exp(2 * x.detach()))


def test_an_offloaded_tensor_leaves_and_comes_back_once_for_all() -> None:
    keeper = SavedTensorManager(Counters(), replaces_tensors=True)
    x = torch.randn(8, 4, requires_grad=True)
    with keeper.track_forward((0, 0), nothing_resident):
        y = x.exp()
        with keeper.offload(y, enabled=True):
            out = (y * y[:, :1]).sum() + (y[2:].T @ y[2:]).sum()
        made = y.detach().clone()
        weak = y.untyped_storage()._weak_ref()
        with keeper.offload_saved(dims=2, enabled=True):
            z = out * x.sigmoid()
            kept = z.untyped_storage()._weak_ref()
            z = z.tanh()
            squared = z * z
        del y, z
    # exp keeps its own result outside of the scope; tanh's lies on the host alone
    assert not gone(weak)
    assert gone(kept)
    (squared.sum() + out).backward()
    found, x.grad = x.grad, None
    y = x.exp()
    out = (y * y[:, :1]).sum() + (y[2:].T @ y[2:]).sum()
    (torch.tanh(out * x.sigmoid()).square().sum() + out).backward()
    assert torch.equal(y.detach(), made)
    torch.testing.assert_close(found, x.grad)


def test_a_kept_number_stays_where_it_is() -> None:
    keeper, scale = SavedTensorManager(Counters(), replaces_tensors=True), torch.tensor(2.0)
    x = torch.randn(4, requires_grad=True)
    with keeper.track_forward((0, 0), nothing_resident):
        out = x * scale
    assert out.grad_fn._saved_other.data_ptr() == scale.data_ptr()
