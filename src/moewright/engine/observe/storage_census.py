"""The census of storages: every byte that lives on this rank's device, whoever holds it.

Nothing announces itself here. What lives when the census begins is taken from the garbage
collector's list of objects, what is made later from the operations that torch dispatches, and a
storage counts until it is freed. So a tensor that an operation keeps beside what autograd saves, a
buffer that nobody lists, or a view of a larger storage weighs what it really holds.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moewright.engine.observe.module_scopes import ModuleScopes
from moewright.engine.observe.observing_mode import OperationKwargs
from moewright.engine.torch_private import has_fake_mode, tree_iter
from moewright.spec.ledger import Module, StorageBytes


@contextmanager
def freeze_older_objects() -> Iterator[None]:
    """Keep the collector, and a census, from objects made before; there may be millions of them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage for as long as the storage lives.

    Tensors without data have one too, unlike an address.
    """
    return int(tensor.untyped_storage()._cdata)


class StorageCensus:
    """A count that weighs the living storages of a device, by the module that made them.

    Storages that were there when the object was made belong to others and are left out.
    """

    def __init__(self, scopes: ModuleScopes, *, device_type: str = "cpu") -> None:
        self._scopes = scopes
        self._device_type = device_type
        self._foreign = {
            storage_id(tensor): weakref.ref(tensor.untyped_storage())
            for tensor in _list_tensors(device_type)
        }
        self.begin()

    def begin(self) -> None:
        """Begin anew, with what this process holds now besides the storages of others."""
        self._count = object()  # frees of storages of an earlier count are not of this one
        # By storage, while it lives: the module that made it, and its bytes.
        self._storages: dict[int, tuple[Module, int]] = {}
        # Storages whose size may change while they live.
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes: dict[Module, int] = defaultdict(int)
        self._total = 0
        gc.collect()  # cycles that nobody holds would count until a pass of the collector
        for tensor in _list_tensors(self._device_type):
            if not self._is_foreign(tensor):
                self._add(tensor, Module.OTHER)
        self._resident = dict(self._live_bytes)
        self._resident_bytes = self._total
        self._kept_bytes = self._total
        self._peak_bytes = self._total
        self._peak_by_module = dict(self._live_bytes)
        self._host_storages: dict[int, int] = {}  # bytes of those that live in host memory
        self._most_host_bytes = 0

    @property
    def most_host_bytes(self) -> int:
        """The most that lay in host memory at a moment of rest, of what was made for it."""
        return self._most_host_bytes

    @property
    def holds_more(self) -> bool:
        """Whether more lives now than was kept at any moment of rest."""
        return self._total > self._kept_bytes

    def note_rest(self) -> None:
        """Note that nothing runs: what lives now is kept for later."""
        self._kept_bytes = max(self._kept_bytes, self._total)

    def note_host_bytes(self) -> None:
        """Note that nothing runs: what lies in host memory now stays there for later."""
        self._most_host_bytes = max(self._most_host_bytes, sum(self._host_storages.values()))

    @property
    def live_bytes(self) -> int:
        """The bytes of all storages that live now."""
        return self._total

    @property
    def totals(self) -> StorageBytes:
        """The bytes at the moments of this count."""
        return StorageBytes(
            resident=self._resident_bytes, kept=self._kept_bytes, peak=self._peak_bytes
        )

    @property
    def peak_by_module(self) -> dict[Module, int]:
        """What lived at the fullest moment beyond what lived at the beginning, by module."""
        grown = {
            module: nbytes - self._resident.get(module, 0)
            for module, nbytes in self._peak_by_module.items()
        }
        return {module: nbytes for module, nbytes in grown.items() if nbytes}

    def weigh(self, func: Any, kwargs: OperationKwargs, out: Any) -> None:
        """Weigh the storages that an operation made."""
        if func.namespace == "fsdp":
            self._follow_resizes(kwargs.get("out"))
        if self._resizable:
            self._weigh_resized()
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            on_host = self._scopes.is_on_host and tensor.device.type == "cpu"
            if on_host or tensor.device.type == self._device_type:
                self._add(tensor, self._scopes.module, on_host=on_host)

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        reference = self._foreign.get(storage_id(tensor))
        return reference is not None and reference() is not None

    def _add(self, tensor: torch.Tensor, module: Module, *, on_host: bool = False) -> None:
        """Weigh a new storage; one in the host's memory weighs nothing on the device."""
        key = storage_id(tensor)
        if key in self._storages or self._is_foreign(tensor):
            return
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._forget, key, self._count).atexit = False
        self._storages[key] = (module, 0)
        if on_host:
            self._host_storages[key] = storage.nbytes()
        self._set_bytes(key, 0 if on_host else storage.nbytes())

    def _follow_resizes(self, filled: Any) -> None:
        """Look at the sizes of these storages from here on.

        fully_shard empties the storage of a gathered weight and fills it again.
        """
        for tensor in tree_iter(filled):
            if isinstance(tensor, torch.Tensor) and storage_id(tensor) in self._storages:
                self._resizable[storage_id(tensor)] = weakref.ref(tensor.untyped_storage())

    def _weigh_resized(self) -> None:
        for key, reference in list(self._resizable.items()):
            storage = reference()
            nbytes = storage.nbytes() if storage is not None else 0
            if nbytes == 0:
                del self._resizable[key]
            if key in self._storages and self._storages[key][1] != nbytes:
                self._set_bytes(key, nbytes)

    def _set_bytes(self, key: int, nbytes: int) -> None:
        module, previous = self._storages[key]
        self._storages[key] = (module, nbytes)
        self._live_bytes[module] += nbytes - previous
        self._total += nbytes - previous
        if self._total > self._peak_bytes:
            self._peak_bytes = self._total
            self._peak_by_module = dict(self._live_bytes)

    def _forget(self, key: int, count: object) -> None:
        if count is self._count and key in self._storages:
            self._set_bytes(key, 0)
            self._host_storages.pop(key, None)
            del self._storages[key]


def _list_tensors(device_type: str) -> Iterator[torch.Tensor]:
    """Yield the tensors of a device that Python objects hold, and the gradients of these.

    Objects that are frozen are in no list of the collector: they are older than this rank.
    """
    kinds = {torch.Tensor, nn.Parameter, *_fake_tensor_types()}
    tensors = [item for item in gc.get_objects() if type(item) in kinds]
    for tensor in tensors:
        if tensor.device.type == device_type and tensor.layout is torch.strided:
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad


def _fake_tensor_types() -> list[type]:
    """Return the class of tensors without data in a dry run, whose tensors are of it.

    Elsewhere they are what a compiler traced with, and weigh nothing.
    """
    if not has_fake_mode():
        return []
    return [kind for kind in torch.Tensor.__subclasses__() if kind.__name__ == "FakeTensor"]
