"""Random noise whose values depend on a token's number, not on where or when they are drawn.

So the noise is the same in any layout and in any recomputation.
"""

from __future__ import annotations

import torch

# Odd 64-bit constants of SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number
# generators), signed.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 24  # significant bits of an fp32 number


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer to int64, which wraps around like the unsigned one."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift with zeros coming in, which torch's shift of a signed number does not do."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@torch.no_grad()
def uniform_noise(numbers_T: torch.Tensor, width: int, *, seed: int, stream: int) -> torch.Tensor:
    """Draw uniform fp32 [T,width] in [0, 1); row t depends on numbers[t], seed and stream alone.

    `numbers_T` [T] int64 tells the tokens apart.
    """
    key = _mix(_mix(torch.tensor(seed, device=numbers_T.device)) ^ stream) + _GOLDEN
    rows_T = _mix(_mix(numbers_T + key) ^ key)
    columns = torch.arange(1, width + 1, device=numbers_T.device) * _GOLDEN
    bits = _shift_right(_mix(rows_T[:, None] + columns), 64 - _BITS)
    return bits.float() * 2.0**-_BITS
