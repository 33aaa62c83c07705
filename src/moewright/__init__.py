"""moewright: plan, train, measure and retune Mixture-of-Experts language models.

Example:
    >>> import moewright as mw
    >>> plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=1)
    >>> plans.best.layout.world_size
    8
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moewright.spec.errors import BadInput, Reason
from moewright.version import __version__

if TYPE_CHECKING:
    from moewright.api import (
        budget,
        compare,
        compare_steps,
        diagnose,
        estimate,
        export,
        fit,
        hardware,
        model,
        models,
        plan,
        read_flags,
        read_run,
        show,
        sweep,
        train,
        validate,
        why_not,
    )

__all__ = [
    "BadInput",
    "Reason",
    "__version__",
    "budget",
    "compare",
    "compare_steps",
    "diagnose",
    "estimate",
    "export",
    "fit",
    "hardware",
    "model",
    "models",
    "plan",
    "read_flags",
    "read_run",
    "show",
    "sweep",
    "train",
    "validate",
    "why_not",
]


def __getattr__(name: str) -> Any:
    """Load the planner when one of its functions is first used: the command line starts faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moewright import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
