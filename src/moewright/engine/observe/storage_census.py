"""The census of storages: every byte that lives on this rank's device, whoever holds it.

Nothing announces itself here. What lives when the census begins is taken from the garbage
collector's list of objects, what is made later from the operations that torch dispatches, and a
storage counts until it is freed. So a tensor that an operation keeps beside what autograd saves, a
buffer that nobody lists, or a view of a larger storage weighs what it really holds. What no row of
a ledger lists is named by its place: the line of the engine that made it, or the object that holds
it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import CellType, CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from moewright.engine.observe.module_scopes import ModuleScopes, OperationKwargs
from moewright.engine.torch_private import has_fake_mode, storage_id, tree_iter
from moewright.spec.ledger import Module, StorageBytes, StorageMoment, StorageRow

# The most places of a moment that are named; the others are one row.
_PLACES_NAMED = 8
# How many containers inside each other are followed from a tensor to the object that holds it.
_HOLDER_DEPTH = 4
# The wait for a collective (engine.comm.collectives): what runs inside works on buffers that gloo
# made for itself, and that its threads drop when they come to it.
_BACKEND_WAIT = "TimedWork.wait"
_PACKAGE = str(Path(__file__).parents[2])
_OWN_FOLDER = str(Path(__file__).parent)


@contextmanager
def freeze_older_objects() -> Iterator[None]:
    """Keep the collector, and a census, from objects made before; there may be millions of them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Storage(NamedTuple):
    """A living storage: the module that made it, its bytes, and where it was made.

    `line` is the code of the engine that made it with its line, `operation` what it called; those
    that were there before the count have neither. `number` is its own, unlike the id, which
    another storage has once this one is freed.
    """

    number: int
    module: Module
    nbytes: int
    line: tuple[CodeType, int] | None = None
    operation: Any = None


class StorageCensus:
    """A count that weighs the living storages of a device, by the module that made them.

    Storages that were there when the object was made belong to others and are left out, but for
    those of `list_states`.
    `list_saved` returns the ids of the storages that are counted as saved for backward.
    """

    def __init__(
        self,
        scopes: ModuleScopes,
        *,
        device_type: str = "cpu",
        list_saved: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._scopes = scopes
        self._device_type = device_type
        self._list_saved = list_saved
        self._numbers = count()
        # Returns the tensors of states and buffers, which rows of the ledger list.
        self.list_states: Callable[[], Iterable[torch.Tensor]] = tuple
        self._foreign = {
            storage_id(tensor): weakref.ref(tensor.untyped_storage())
            for tensor in _list_tensors(device_type)
        }
        self.begin()

    def begin(self) -> None:
        """Begin anew, with what this process holds now besides the storages of others."""
        self._storages: dict[int, _Storage] = {}  # those that live
        # What tells that one is freed; those of an earlier count go with its references.
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Storages whose size may change while they live.
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live_bytes: dict[Module, int] = defaultdict(int)
        self._total = 0
        gc.collect()  # cycles that nobody holds would count until a pass of the collector
        listed = {storage_id(tensor) for tensor in self.list_states()}
        for key in listed:
            self._foreign.pop(key, None)
        tensors: dict[int, torch.Tensor] = {}
        for tensor in _list_tensors(self._device_type):
            if not self._is_foreign(storage_id(tensor)):
                tensors.setdefault(storage_id(tensor), tensor)
                self._add(tensor)
        self._listed = self._number_states()
        self._holders = name_holders(
            {key: tensor for key, tensor in tensors.items() if key not in listed}
        )
        del tensors
        self._resident = dict(self._live_bytes)
        self._most = dict.fromkeys(StorageMoment, self._total)
        self._snapshots = {StorageMoment.RESIDENT: self._take_snapshot()}
        self._is_updating = False
        self._peak_by_module = dict(self._live_bytes)
        self._host_storages: dict[int, int] = {}  # bytes of those that live in host memory
        self._most_host_bytes = 0

    @property
    def most_host_bytes(self) -> int:
        """The most that lay in host memory at a moment of rest, of what was made for it."""
        return self._most_host_bytes

    def note_rest(self) -> None:
        """Note that nothing runs: what lives now is kept for later."""
        if self._total > self._most[StorageMoment.KEPT]:
            self._note(StorageMoment.KEPT)

    def note_gradients_ready(self) -> None:
        """Note that backward has ended: from now on gradients are reduced and weights updated."""
        gc.collect()  # cycles, of Triton's interpreter say, which nobody holds
        self._is_updating = True
        self._note(StorageMoment.UPDATE)

    def note_gradients_reduced(self) -> None:
        """Note that the gradients are reduced, and nothing has been updated."""
        gc.collect()  # cycles, of Triton's interpreter say, which nobody holds
        self._note(StorageMoment.REDUCED)

    def end(self) -> None:
        """Note that the step has ended: what lives now, the next one finds."""
        gc.collect()  # cycles, of Triton's interpreter say, which nobody holds
        self._note(StorageMoment.LEFT)
        # Gradients that are made in the step are listed as soon as they are there.
        self._listed |= self._number_states()

    def _number_states(self) -> set[int]:
        """Return the numbers of the storages of states and buffers that live now."""
        keys = {storage_id(tensor) for tensor in self.list_states()}
        return {self._storages[key].number for key in keys if key in self._storages}

    def _note(self, moment: StorageMoment) -> None:
        self._most[moment] = self._total
        self._snapshots[moment] = self._take_snapshot()

    def _take_snapshot(self) -> tuple[dict[int, _Storage], frozenset[int]]:
        """Return the storages that live now, and which of them are counted as saved."""
        return dict(self._storages), frozenset(self._list_saved())

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
        return StorageBytes(**{moment.value: self._most[moment] for moment in StorageMoment})

    @property
    def unlisted(self) -> tuple[StorageRow, ...]:
        """What no row of a ledger lists, by moment and place, the largest first."""
        rows: list[StorageRow] = []
        for moment, (storages, saved) in self._snapshots.items():
            nbytes: dict[tuple[Module, str], int] = defaultdict(int)
            for key, storage in storages.items():
                is_listed = storage.number in self._listed
                if not is_listed and key not in saved and storage.nbytes:
                    nbytes[storage.module, self._name_place(key, storage)] += storage.nbytes
            # Those of equal size by name: what the collector lists first is chance.
            places = sorted(nbytes.items(), key=lambda item: (-item[1], item[0]))
            rows += (
                StorageRow(moment=moment, module=module, place=place, bytes=size)
                for (module, place), size in places[:_PLACES_NAMED]
            )
            rest = sum(size for _, size in places[_PLACES_NAMED:])
            if rest:
                other = Module.OTHER
                rows.append(StorageRow(moment=moment, module=other, place="elsewhere", bytes=rest))
        return tuple(rows)

    def _name_place(self, key: int, storage: _Storage) -> str:
        if storage.line is None:
            return self._holders.get(key, "held by no object")
        code, line = storage.line
        file = code.co_filename.removeprefix(_PACKAGE).lstrip("/")
        return f"{file}:{line} in {code.co_name} ({storage.operation})"

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
            if isinstance(tensor, torch.Tensor):
                on_host = self._scopes.is_on_host and tensor.device.type == "cpu"
                if on_host or tensor.device.type == self._device_type:
                    self._add(tensor, func, on_host=on_host)

    def _is_foreign(self, key: int) -> bool:
        reference = self._foreign.get(key)
        return reference is not None and reference() is not None

    def _add(self, tensor: torch.Tensor, operation: Any = None, *, on_host: bool = False) -> None:
        """Weigh a new storage; one in the host's memory weighs nothing on the device.

        `operation` made it; None where it was there before the count.
        """
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        if key in self._storages or self._is_foreign(key):
            return
        nbytes = 0 if on_host else storage.nbytes()
        if operation is None:
            made = _Storage(next(self._numbers), Module.OTHER, nbytes)
        else:
            line = _find_engine_line(sys._getframe(1))
            if line is not None and line[0].co_qualname == _BACKEND_WAIT:
                return
            made = _Storage(next(self._numbers), self._scopes.module, nbytes, line, operation)
        if on_host:
            self._host_storages[key] = storage.nbytes()
        self._storages[key] = made
        self._references[key] = weakref.ref(storage, partial(self._forget, key))
        self._grow(made.module, nbytes)

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
            if key in self._storages and self._storages[key].nbytes != nbytes:
                made = self._storages[key]
                self._storages[key] = made._replace(nbytes=nbytes)
                self._grow(made.module, nbytes - made.nbytes)

    def _grow(self, module: Module, nbytes: int) -> None:
        """Add to what lives now; `nbytes` are negative where storages are freed."""
        self._live_bytes[module] += nbytes
        self._total += nbytes
        if self._total > self._most[StorageMoment.PEAK]:
            self._note(StorageMoment.PEAK)
            self._peak_by_module = dict(self._live_bytes)
        if self._is_updating and self._total > self._most[StorageMoment.UPDATE]:
            self._note(StorageMoment.UPDATE)

    def _forget(self, key: int, reference: object) -> None:
        # Another storage may have the id by now.
        if self._references.get(key) is reference:
            del self._references[key]
            self._host_storages.pop(key, None)
            freed = self._storages.pop(key)
            self._grow(freed.module, -freed.nbytes)


def _find_engine_line(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Return the innermost line of the engine that runs, without what observes it."""
    while frame is not None:
        if _is_seen(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


@cache
def _is_seen(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.startswith(_OWN_FOLDER)


def name_holders(tensors: Mapping[int, torch.Tensor]) -> dict[int, str]:
    """Return for tensors, by their keys, the class and the attribute of an object that holds each.

    Lists, dictionaries and closures are not named, but the object that holds them.
    """
    names: dict[int, str] = {}
    # By the id of an object: the tensors in it, each with the path to it from there.
    inside: dict[int, list[tuple[int, str]]] = {
        id(tensor): [(key, "")] for key, tensor in tensors.items()
    }
    level: list[Any] = list(tensors.values())
    seen = {id(tensors), id(inside)}
    for _ in range(_HOLDER_DEPTH):
        seen.update(map(id, (level, *level)))
        around: list[Any] = []
        for holder in gc.get_referrers(*level) if level else ():
            if id(holder) in seen or isinstance(holder, FrameType):
                continue
            seen.add(id(holder))
            is_container = isinstance(holder, (dict, list, tuple, set, CellType))
            for name, value in _list_values(holder):
                for key, path in inside.get(id(value), ()):
                    if is_container:
                        inside.setdefault(id(holder), []).append((key, path or name))
                    else:
                        owner = getattr(holder, "__qualname__", type(holder).__name__)
                        names.setdefault(key, f"{owner}.{name or path}")
            if is_container and id(holder) in inside:
                around.append(holder)
        level = around
    return names


def _list_values(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, by the name of each; an object's own dictionary has none."""
    if isinstance(holder, dict):
        yield from ((str(key), value) for key, value in list(holder.items()))
    elif isinstance(holder, (list, tuple, set)):
        yield from (("", value) for value in list(holder))
    elif isinstance(holder, CellType):
        yield "", holder.cell_contents
    else:
        own = getattr(holder, "__dict__", None)
        yield "", own
        yield "", getattr(holder, "__closure__", None)
        for kind in type(holder).__mro__:
            slots = vars(kind).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                yield slot, getattr(holder, slot, None)
        if isinstance(own, dict):
            yield from own.items()


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
