"""The dispatch mode through which counters see every operation that torch dispatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moewright.engine.torch_private import TorchDispatchMode

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
        kwargs = kwargs or {}
        for observe in self._before:
            observe(func, args, kwargs)
        out = func(*args, **kwargs)
        for observe_result in self._after:
            observe_result(func, kwargs, out)
        return out
