"""The memory meter of a dry run: it weighs tensors that have no data."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moewright.engine.observe.counters import storage_id
from moewright.engine.observe.module_scopes import ModuleScopes
from moewright.spec.ledger import Module

_aten = torch.ops.aten


class MemoryMeter(TorchDispatchMode):
    """A dispatch mode that weighs the live tensors, by the module that made them.

    It also answers what tensors without data cannot: every number that the host reads is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_by_module: dict[Module, int] = {}
        self._scopes: ModuleScopes | None = None
        self._live_bytes: dict[Module, int] = defaultdict(int)
        # By storage, while it lives: the module that made it, and its bytes.
        self._storages: dict[int, tuple[Module, int]] = {}
        # Storages whose size may change while they live.
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._total_bytes = 0
        self._peak_bytes = 0

    def start(self, scopes: ModuleScopes) -> None:
        """Weigh what is made from here on; what lives already stays unweighed."""
        self._scopes = scopes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is _aten._local_scalar_dense:
            return 1
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fsdp":
            self._follow_resizes((kwargs or {}).get("out"))
        self._weigh_resized()
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        key = storage_id(tensor)
        if key in self._storages or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        module = Module.OTHER
        nbytes = 0
        if self._scopes is not None and not self._scopes.is_on_host:
            module = self._scopes.module
            nbytes = storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        self._storages[key] = (module, 0)
        self._set_bytes(key, nbytes)

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
        self._total_bytes += nbytes - previous
        if self._total_bytes > self._peak_bytes:
            self._peak_bytes = self._total_bytes
            self.peak_by_module = dict(self._live_bytes)

    def _forget(self, key: int) -> None:
        self._set_bytes(key, 0)
        del self._storages[key]
