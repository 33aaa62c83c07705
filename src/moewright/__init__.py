"""moewright: plan, train, measure and retune Mixture-of-Experts language models.

Example:
    >>> import moewright as mw
    >>> plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=1)
    >>> plans.best.layout.world_size
    8
"""

from __future__ import annotations

from moewright.version import __version__

# As typing has it, which takes longer to import than all of this: the command line must be ready
# for an interrupt soon.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from moewright.api.face import (
        budget,
        check,
        compare,
        compare_run,
        compare_steps,
        design,
        diagnose,
        estimate,
        export,
        export_traces,
        fit,
        forecast_loads,
        hardware,
        judge,
        model,
        models,
        place,
        plan,
        read_flags,
        read_run,
        show,
        sweep,
        train,
        validate,
        watch,
        what_if,
        why_not,
    )
    from moewright.spec.errors import BadInput, Reason

__all__ = [
    "BadInput",
    "Reason",
    "__version__",
    "budget",
    "check",
    "compare",
    "compare_run",
    "compare_steps",
    "design",
    "diagnose",
    "estimate",
    "export",
    "export_traces",
    "fit",
    "forecast_loads",
    "hardware",
    "judge",
    "model",
    "models",
    "place",
    "plan",
    "read_flags",
    "read_run",
    "show",
    "sweep",
    "train",
    "validate",
    "watch",
    "what_if",
    "why_not",
]


def __getattr__(name: str) -> Any:
    """Load the planner when one of its functions is first used: the command line starts faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("BadInput", "Reason"):
        from moewright.spec import errors

        return getattr(errors, name)
    from moewright.api import face

    return getattr(face, name)


def __dir__() -> list[str]:
    return sorted(__all__)
