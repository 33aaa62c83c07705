"""The tensors that autograd saves in a forward.

They are counted, and where the layout says so recomputed or offloaded instead. There are two ways
to recompute, as in Megatron-LM. `run_checkpointed` runs a block without a graph, keeps its inputs,
and runs it again in backward. `SavedTensorManager.discard_and_recompute` drops one tensor that a
following operation saves, and computes it again when backward asks for it. A recomputation computes
and communicates like the forward did, and is counted like it; it reuses the forward's routing
(`RoutingDecisions`).

`SavedTensorManager.offload` moves a saved tensor to host memory, and back before backward needs it:
the tensors of a chunk's last layer before the backward waits for its input, those of every other
layer when the backward of the layer after it begins. On a GPU both copies run on streams of their
own, beside the compute. On a CPU the copy lies in the same memory as the original did: it saves
nothing, but what a rank's device would hold is still counted and tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.columns import NarrowInput
from moewright.engine.kernels.low_precision import NarrowTensor
from moewright.engine.kernels.products import Products
from moewright.engine.memory.host_copies import HostCopies, build_host_copies
from moewright.engine.observe.counters import Counters
from moewright.engine.torch_private import storage_id

IsResident = Callable[[torch.Tensor], bool]
CountTensor = Callable[[torch.Tensor], None]


@dataclass(kw_only=True, slots=True)
class RoutingDecisions:
    """The decisions of a checkpointed MoE block's forward, which its recomputation reuses.

    `experts` [T,k] int64 are the chosen experts; `shares` has, for each balance loss, the experts'
    shares of the rows, fp32. A recomputation takes these instead of routing again, so that rounding
    cannot send a token elsewhere the second time, and the ranks need not sum the shares again.
    """

    experts: torch.Tensor | None = None
    shares: tuple[torch.Tensor, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tracking:
    """What a SavedTensorManager knows of the forward that runs."""

    count: Callable[[torch.Tensor], None] | None = None
    replacements: dict[int, _Replacement] = field(default_factory=dict)
    offloaded_dims: int = 0
    staying: frozenset[int] = frozenset()
    offloaded: list[torch.Tensor] = field(default_factory=list)
    key: tuple[int, int] = (0, 0)


class SavedTensorManager:
    """A manager that sees every tensor that autograd saves in a forward.

    `replaces_tensors` says whether some are to be recomputed or offloaded.
    """

    def __init__(self, counters: Counters, *, replaces_tensors: bool) -> None:
        self._counters = counters
        self.holds_packed = False  # whether weights are held in fewer bits
        self._replaces_tensors = replaces_tensors
        self._count: Callable[[torch.Tensor], None] | None = None
        self._replacements: dict[int, _Replacement] = {}  # by the storage they stand for
        self._host_copies: HostCopies | None = None  # made with the first tensor that moves
        self._key = (0, 0)  # of the forward that runs
        # The offloaded tensors of the last layer of every forward in flight that has any.
        self._last_layers: dict[tuple[int, int], _OffloadedLayer] = {}
        # Every saved tensor with this number of dims is offloaded (0: none), but for some storages.
        self._offloaded_dims = 0
        self._staying: frozenset[int] = frozenset()
        self._offloaded: list[torch.Tensor] = []
        # What makes a tensor that was made of packed weights, by its storage, while it lives.
        self._unpacked: dict[int, Callable[[], torch.Tensor]] = {}

    def is_in_forward(self) -> bool:
        """Tell whether a tracked forward runs now, and not a recomputation of one."""
        return self._count is not None

    def note_unpacked(
        self, tensor: torch.Tensor, unpack: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor that `unpack` made of weights that stay in memory.

        Where an operation saves it, backward unpacks it again.
        """
        key = storage_id(tensor)
        self._unpacked[key] = unpack
        # When a storage is freed, another one may get its id.
        finalizer = weakref.finalize(tensor.untyped_storage(), self._unpacked.pop, key, None)
        finalizer.atexit = False
        return tensor

    @contextmanager
    def track_forward(self, key: tuple[int, int], is_resident: IsResident) -> Iterator[None]:
        """Track the forward of `key` (micro-batch, chunk), which runs inside the with block.

        `is_resident` tells the tensors that stay in memory anyway (weights, caches).
        """
        with self._counters.count_saved(key, is_resident) as count:
            if count is None and not self._replaces_tensors and not self.holds_packed:
                yield
                return
            self._count = count or (lambda tensor: None)
            self._key = key
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            finally:
                self._count = None

    def exchange_state(self, state: object | None) -> object:
        """Put what tracks a pass in place (None: nothing does) and return what did."""
        left = _Tracking(
            count=self._count,
            replacements=self._replacements,
            offloaded_dims=self._offloaded_dims,
            staying=self._staying,
            offloaded=self._offloaded,
            key=self._key,
        )
        new = state if isinstance(state, _Tracking) else _Tracking()
        self._count = new.count
        self._replacements = new.replacements
        self._offloaded_dims = new.offloaded_dims
        self._staying = new.staying
        self._offloaded = new.offloaded
        self._key = new.key
        return left

    def fetch_last_layer(self, key: tuple[int, int]) -> None:
        """Begin to fetch what the backward of `key` needs first; it has not begun."""
        layer = self._last_layers.pop(key, None)
        if layer is not None:
            layer.fetch()

    def fetch_chunk(self, key: tuple[int, int]) -> None:
        """Begin to fetch all that the backward of `key` needs, and count it as kept from now on."""
        layer = self._last_layers.pop(key, None)
        if layer is None:
            return
        count = self._counters.count_fetched(key)
        while layer is not None:
            layer.fetch(count)
            layer = layer.take_before()
        self._counters.note_saved()

    def count_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count and return a tensor that is kept for backward without autograd's knowledge."""
        if self._count is not None:
            self._count(tensor)
        return tensor

    def _is_active(self, enabled: bool) -> bool:
        """Tell whether to replace tensors now.

        They are replaced only in a tracked forward: in evaluation nothing is saved, and what a
        recomputation saves is freed soon.
        """
        return enabled and self._count is not None and torch.is_grad_enabled()

    @contextmanager
    def discard_and_recompute(
        self,
        output: torch.Tensor,
        compute: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
        enabled: bool,
    ) -> Iterator[None]:
        """Drop `output` where operations inside the with block save it; backward recomputes it.

        Backward runs compute(*inputs) once for all operations that saved it. Unless `enabled`,
        nothing changes.
        """
        if not self._is_active(enabled):
            yield
            return
        # What a recomputation reads is kept like any saved tensor: it may itself be offloaded.
        kept = tuple(self._pack(x.detach()) for x in inputs)
        key = storage_id(output)
        self._replacements[key] = _Recomputed(compute, kept, self._counters)
        try:
            yield  # `output` is alive here, so no other storage has its id
        finally:
            del self._replacements[key]

    @contextmanager
    def offload(self, *tensors: torch.Tensor, enabled: bool) -> Iterator[None]:
        """Keep these tensors on the host where operations inside the with block save them.

        Tensors that `discard_and_recompute` replaces are not offloaded. Unless `enabled`, nothing
        changes.
        """
        if not self._is_active(enabled):
            yield
            return
        added = {
            storage_id(x): self._new_offloaded(x)
            for x in tensors
            if storage_id(x) not in self._replacements
        }
        self._replacements.update(added)
        try:
            yield
        finally:
            for key in added:
                del self._replacements[key]

    @contextmanager
    def keep_converted(
        self, tensor: torch.Tensor, products: Products, ends: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Keep a tensor as products convert it where operations inside the with block save it.

        They multiply what is kept, and take it for the weight's gradient; for others backward
        widens it again. What `offload` keeps on the host goes there converted. Nothing changes
        where products convert nothing, nor for tensors that are recomputed.
        """
        key = storage_id(tensor)
        before = self._replacements.get(key)
        is_sent = isinstance(before, _Offloaded)
        if not self._is_active(True) or not (before is None or is_sent):
            yield
            return
        narrow = products.convert_input(tensor.detach(), ends)
        if narrow is None:
            yield
            return
        keep = self._send if is_sent else self.count_saved
        self._replacements[key] = _Converted(narrow, keep, (tensor, products), self._counters)
        try:
            yield  # `tensor` is alive here, so no other storage has its id
        finally:
            del self._replacements[key]
            if before is not None:
                self._replacements[key] = before

    def find_converted(self, x: torch.Tensor, products: Products) -> NarrowTensor | None:
        """Return what is kept of a tensor by these products' conversion; None for nothing."""
        kept = self._find_kept(x, products)
        return None if kept is None else kept.find_numbers()

    def hold_converted(self, x: torch.Tensor, products: Products) -> _HeldInput | None:
        """Keep what is kept of a tensor for one more operation; None where nothing is."""
        kept = self._find_kept(x, products)
        return None if kept is None else kept.hold()

    def _find_kept(self, x: torch.Tensor, products: Products) -> _Converted | None:
        kept = self._replacements.get(storage_id(x))
        if isinstance(kept, _Converted) and kept.is_of(x, products):
            return kept
        return None

    @contextmanager
    def offload_saved(
        self, *, dims: int, staying: Sequence[torch.Tensor], enabled: bool
    ) -> Iterator[None]:
        """Keep every tensor with `dims` dims on the host that operations inside the block save.

        That includes tensors that no `offload` names, but not those that are `staying`. Unless
        `enabled`, nothing changes.
        """
        if not self._is_active(enabled):
            yield
            return
        before = set(self._replacements)
        self._offloaded_dims = dims
        self._staying = frozenset(map(storage_id, staying))
        try:
            yield
        finally:
            self._offloaded_dims = 0
            self._staying = frozenset()
            self._offloaded.clear()
            self._replacements = {
                key: replacement for key, replacement in self._replacements.items() if key in before
            }

    def _send(self, tensor: torch.Tensor) -> _SavedView:
        """Send a tensor to the host, of which nothing else is kept."""
        return self._new_offloaded(tensor).add_view(tensor)

    def _new_offloaded(self, tensor: torch.Tensor) -> _Offloaded:
        if self._host_copies is None:
            self._host_copies = build_host_copies(tensor.device)
        number = self._counters.scopes.current.layer
        layer = self._last_layers.get(self._key)
        if layer is None or layer.number != number:
            layer = _OffloadedLayer(number, before=layer)
            self._last_layers[self._key] = layer
        offloaded = _Offloaded(self._counters, self._host_copies, layer)
        layer.tensors.append(offloaded)
        return offloaded

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedView:
        key = storage_id(tensor)
        unpack = self._unpacked.get(key)
        if unpack is not None:
            return _SavedView(
                base=_Unpacked(unpack),
                size=tensor.size(),
                stride=tensor.stride(),
                offset=tensor.storage_offset(),
            )
        is_offloaded = self._offloaded_dims and tensor.dim() == self._offloaded_dims
        if is_offloaded and key not in self._staying and key not in self._replacements:
            self._replacements[key] = self._new_offloaded(tensor)
            self._offloaded.append(tensor)  # alive as long as its id is looked up
        replacement = self._replacements.get(key)
        if replacement is not None:
            return replacement.add_view(tensor)
        assert self._count is not None  # hooks and replacements exist only inside `track_forward`
        self._count(tensor)
        return tensor


class _Replacement:
    """A stand-in for a saved tensor until backward restores it.

    The tensor is restored when backward asks for its first view, and freed after the last view.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._scope = counters.scopes.current
        self._value: torch.Tensor | None = None
        self._pending_views = 0

    def restore(self) -> torch.Tensor:
        raise NotImplementedError

    def add_view(self, tensor: torch.Tensor) -> _SavedView:
        self._pending_views += 1
        return _SavedView(
            base=self, size=tensor.size(), stride=tensor.stride(), offset=tensor.storage_offset()
        )

    def take(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad(), self._counters.scopes.enter(self._scope):
                self._value = self.restore()
        value = self._value
        self._pending_views -= 1
        if not self._pending_views:
            self._value = None
        return value


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A stand-in for a weight that every operation unpacks for itself."""

    unpack: Callable[[], torch.Tensor]

    def take(self) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack()


class _Recomputed(_Replacement):
    """A replacement that computes the tensor again from its inputs."""

    def __init__(
        self,
        compute: Callable[..., torch.Tensor],
        inputs: tuple[torch.Tensor | _SavedView, ...],
        counters: Counters,
    ) -> None:
        super().__init__(counters)
        self._compute = compute
        self._inputs = inputs

    def restore(self) -> torch.Tensor:
        return self._compute(*map(_unpack, self._inputs))


class _Converted(_Replacement):
    """A replacement that keeps a tensor in numbers of fewer bits.

    The first operation that saves or holds the tensor makes `keep` keep its parts, on the device or
    on the host. They last until the last that holds it has taken them; others share a widened copy.
    """

    def __init__(
        self,
        narrow: NarrowTensor,
        keep: Callable[[torch.Tensor], torch.Tensor | _SavedView],
        source: tuple[torch.Tensor, Products],
        counters: Counters,
    ) -> None:
        super().__init__(counters)
        like, self._products = source
        self._narrow = narrow
        self._keep = keep
        self._parts: tuple[torch.Tensor | _SavedView, ...] = ()
        self._dtype = like.dtype
        self._offset = like.storage_offset()
        self._geometry = _geometry(like)
        self._pending_holds = 0

    def is_of(self, x: torch.Tensor, products: Products) -> bool:
        """Tell whether it is this view of its storage, as these products convert it."""
        return products is self._products and _geometry(x) == self._geometry

    def find_numbers(self) -> NarrowTensor | None:
        """Return the numbers; None where they have left for the host."""
        if not self._parts:
            return self._narrow
        parts = [part for part in self._parts if isinstance(part, torch.Tensor)]
        if len(parts) < len(self._parts):
            return None
        return self._narrow.with_tensors(parts)

    def add_view(self, tensor: torch.Tensor) -> _SavedView:
        self._keep_parts()
        view = super().add_view(tensor)
        return replace(view, offset=view.offset - self._offset)

    def hold(self) -> _HeldInput:
        """Keep it for one operation that takes the numbers as they are."""
        self._keep_parts()
        self._pending_holds += 1
        return _HeldInput(self)

    def _keep_parts(self) -> None:
        if not self._parts:
            self._parts = tuple(map(self._keep, self._narrow.tensors))
            self._narrow = self._narrow.without_data()  # what was sent must not stay as well

    def restore(self) -> torch.Tensor:
        return self._take_numbers(is_last=not self._pending_holds).widen(self._dtype)

    def release(self) -> NarrowInput:
        """Return the numbers for one operation that held them."""
        self._pending_holds -= 1
        awaits_restore = self._pending_views > 0 and self._value is None
        is_last = not self._pending_holds and not awaits_restore
        with torch.no_grad(), self._counters.scopes.enter(self._scope):
            return NarrowInput(dtype=self._dtype, rows=self._take_numbers(is_last=is_last))

    def _take_numbers(self, *, is_last: bool) -> NarrowTensor:
        parts = tuple(map(_unpack, self._parts))
        self._parts = () if is_last else parts
        return self._narrow.with_tensors(parts)


class _HeldInput:
    """What one operation's backward takes of a tensor that is kept in numbers of fewer bits."""

    def __init__(self, kept: _Converted) -> None:
        self._kept = kept

    def take(self) -> NarrowInput:
        """Return the numbers as they are kept, once."""
        return self._kept.release()

    def take_wide(self) -> torch.Tensor:
        """Return the tensor with these numbers, once."""
        return self.take().widen()


def _geometry(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset()


class _OffloadedLayer:
    """The offloaded tensors of a layer in one forward, and those of the layer before it."""

    def __init__(self, number: int | None, *, before: _OffloadedLayer | None) -> None:
        self.number = number
        self.tensors: list[_Offloaded] = []
        self._before = before

    def fetch(self, count: CountTensor | None = None) -> None:
        """Begin to fetch every tensor, those that backward needs first before the others."""
        while self.tensors:
            self.tensors.pop().fetch(count)

    def take_before(self) -> _OffloadedLayer | None:
        """Return the layer before this one, once."""
        before, self._before = self._before, None
        return before

    def begin_backward(self) -> None:
        """Fetch what has not been fetched, and begin with the layer whose backward comes next."""
        self.fetch()
        before = self.take_before()
        if before is not None:
            before.fetch()


class _Offloaded(_Replacement):
    """A replacement that lies on the host, from the first time that an operation saves it."""

    def __init__(self, counters: Counters, copies: HostCopies, layer: _OffloadedLayer) -> None:
        super().__init__(counters)
        self._copies = copies
        self._layer = layer
        self._host: Any = None
        self._fetched: Any = None

    def add_view(self, tensor: torch.Tensor) -> _SavedView:
        if self._host is None:
            self._scope = self._counters.scopes.current  # of the module that would have kept it
            # The whole storage: other operations may save other views of it.
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            with self._counters.scopes.on_host():
                self._host = self._copies.start_copy(tensor.as_strided((size,), (1,), 0))
        return super().add_view(tensor)

    def fetch(self, count: CountTensor | None = None) -> None:
        """Begin to copy it back, where an operation has saved it, and count it as kept."""
        if self._host is not None:
            with torch.no_grad(), self._counters.scopes.enter(self._scope):
                self._fetched = self._copies.start_fetch(self._host)
                if count is not None:
                    count(self._fetched[0])
            self._host = None

    def restore(self) -> torch.Tensor:
        self._layer.begin_backward()
        fetched, self._fetched = self._fetched, None
        return self._copies.finish_fetch(fetched)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedView:
    """The view of a replaced tensor that one operation would have saved."""

    base: _Replacement | _Unpacked
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(saved: torch.Tensor | _SavedView) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    return saved.base.take().as_strided(saved.size, saved.stride, saved.offset)


def run_checkpointed(
    counters: Counters, block: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
) -> Any:
    """Return block(*inputs), of which only the inputs are kept; backward runs it again.

    The recomputation is counted to the module that runs now.
    """
    return _Checkpoint.apply(counters, block, *inputs)


class _Checkpoint(ReleasingFunction):
    """A reentrant checkpoint, whose backward builds the graph of the block.

    It goes through that graph at once, weight gradients included.
    """

    @staticmethod
    def forward(
        ctx: Any,
        counters: Counters,
        block: Callable[..., tuple[torch.Tensor, ...]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.counters = counters
        ctx.scope = counters.scopes.current
        ctx.block = block
        ctx.save_for_backward(*inputs)
        out = block(*inputs)
        # Numbers of rows and ids of experts have no gradient.
        ctx.mark_non_differentiable(*(x for x in out if not x.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = [
            x.detach().requires_grad_(needs_grad)
            for x, needs_grad in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad(), ctx.counters.scopes.enter(ctx.scope):
            outputs = ctx.block(*inputs)
            used = [
                (out, grad)
                for out, grad in zip(outputs, grads, strict=True)
                if out.requires_grad and grad is not None
            ]
            # Not `grad`: weights accumulate their gradients here, and their hooks run.
            torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])
        return None, None, *(x.grad for x in inputs)
