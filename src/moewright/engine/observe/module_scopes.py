"""What counters see: every operation that torch dispatches, and the module that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from moewright.engine.torch_private import DEVICE_QUESTION, TorchDispatchMode
from moewright.spec.ledger import Module

OperationArgs = tuple[Any, ...]
OperationKwargs = Mapping[str, Any]
# What sees an operation before it runs: the operation and its arguments.
BeforeOperation = Callable[[Any, OperationArgs, OperationKwargs], None]
# What sees it after it ran: the operation, its keyword arguments and what it returned.
AfterOperation = Callable[[Any, OperationKwargs, Any], None]


class ObservingMode(TorchDispatchMode):
    """A dispatch mode that shows every operation to some functions.

    One mode serves all of them: torch hands an operation from mode to mode, and each of these
    passes costs more than what a counter does.
    """

    def __init__(
        self, *, before: Sequence[BeforeOperation] = (), after: Sequence[AfterOperation] = ()
    ) -> None:
        super().__init__()
        self._before = tuple(before)
        self._after = tuple(after)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Wrapping __torch_dispatch__ against a compiler would import the compiler: two seconds in
        # every rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUESTION:
            return func(*args)
        kwargs = kwargs or {}
        for observe in self._before:
            observe(func, args, kwargs)
        out = func(*args, **kwargs)
        for observe_result in self._after:
            observe_result(func, kwargs, out)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A module that work is attributed to, alone or as a part of an MTP depth, and its layer."""

    module: Module
    in_mtp_depth: bool
    layer: int | None = None


class ModuleScopes:
    """A stack of scopes that follows the model as it runs, one for each rank."""

    def __init__(self) -> None:
        self._stack = [Scope(module=Module.OTHER, in_mtp_depth=False)]
        self._is_on_host = False

    @property
    def current(self) -> Scope:
        """The scope of what runs now; backward hands it to `enter` to come back to it."""
        return self._stack[-1]

    @property
    def module(self) -> Module:
        """The module of the current scope."""
        return self.current.module

    def exchange_state(self, state: object | None) -> object:
        """Put a stack in place (None: a fresh one) and return the one that was."""
        left = self._stack
        self._stack = state if isinstance(state, list) else [left[0]]
        return left

    @property
    def is_on_host(self) -> bool:
        """Whether tensors that are made now lie in host memory (see `on_host`)."""
        return self._is_on_host

    @contextmanager
    def enter(self, scope: Module | Scope) -> Iterator[None]:
        """Attribute what runs inside to a module.

        Everything in an MTP depth is attributed to the depth, except its router.
        """
        if isinstance(scope, Module):
            scope = self._nest(scope)
        self._stack.append(scope)
        try:
            yield
        finally:
            self._stack.pop()

    def _nest(self, module: Module) -> Scope:
        in_mtp_depth = self.current.in_mtp_depth or module is Module.MTP
        if in_mtp_depth and module is not Module.ROUTER:
            module = Module.MTP
        return Scope(module=module, in_mtp_depth=in_mtp_depth, layer=self.current.layer)

    def in_layer(self, layer: int) -> AbstractContextManager[None]:
        """Say in which layer the modules that are entered inside lie."""
        return self.enter(replace(self.current, layer=layer))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Declare that tensors made inside lie in host memory.

        A dry run needs it: there the CPU stands for a device with a memory of its own.
        """
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False
