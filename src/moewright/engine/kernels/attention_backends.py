"""Kernels of attention on a GPU: the first row of a table that the card and its packages fit.

The engine calls torch's own operations of flash attention, whose log-sum-exp merges blocks of
context parallelism and whose segments bound documents. torch runs FlashAttention-2 behind them, or
what an installed package registers in its place (torch.nn.attention, 2.11 and later).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn import attention


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """Kernels of attention, the cards that they are for, and why they are taken there.

    `majors` are the cards' compute capabilities; of any card where there are none. torch knows them
    as `implementation`, once `package` is installed; "" for torch's own.
    """

    name: str
    reason: str
    majors: tuple[int, ...] = ()
    implementation: str = ""
    package: str = ""


# Not taken: FlashAttention-4, as torch does not say before it runs which widths of heads it has,
# and cuDNN's attention, which has no windows.
BACKENDS = (
    AttentionKernels(
        name="FlashAttention-3",
        reason="it is installed, and made for cards of 9.x",
        majors=(9,),
        implementation="FA3",
        package="flash_attn_interface",
    ),
    AttentionKernels(
        name="FlashAttention-2",
        reason="it comes with torch, and no faster one for this card is installed",
    ),
)


def choose_attention(major: int, is_there: Callable[[AttentionKernels], bool]) -> AttentionKernels:
    """Return the kernels of attention for a card; `is_there` tells whether torch can take them."""
    return next(
        backend
        for backend in BACKENDS
        if not backend.majors or (major in backend.majors and is_there(backend))
    )


def is_installed(backend: AttentionKernels) -> bool:
    """Tell whether this torch knows an implementation, and its package is installed."""
    implementations: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    return backend.implementation in implementations and find_spec(backend.package) is not None


def activate_attention(device: torch.device) -> str:
    """Have torch run the kernels for a card, and return which they are and why."""
    major, _ = torch.cuda.get_device_capability(device)
    backend = choose_attention(major, is_installed)
    if backend.implementation:
        attention.activate_flash_attention_impl(backend.implementation)
    return f"attention by {backend.name}: {backend.reason}"
