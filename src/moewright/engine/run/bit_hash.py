"""A hash of a tensor's bits in which each element's place counts."""

from __future__ import annotations

from functools import cache

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK = 1 << 16  # its keys are 512 KiB, which stay in a core's cache
_SEED = 0x5DEECE66D  # any; all ranks and starts must draw the same keys
# By which the hash of the blocks before is multiplied; odd, so that no block is forgotten.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit multilinear hash, [] int64, on the tensor's device.

    It sums words of 32 bits or fewer times random keys of 64. Two tensors that differ in any bits
    have the same hash with a probability of 2^-32 at most, also where elements have changed places
    or two flips would cancel in a sum (Lemire and Kaser, Strongly universal string hashing is fast,
    2014). Blocks of words share the keys: their sums are the digits of a number to a random base.
    It is the same on every device.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    keys = _draw_keys(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in words.split(_BLOCK):
        # int64 wraps around, so that this is arithmetic modulo 2^64.
        total = total * _FACTOR + (block * keys[: len(block)]).sum()
    return total


@cache
def _draw_keys(device: torch.device) -> torch.Tensor:
    """Return a key for each word of a block, [65536] int64; who hashes nothing has none."""
    # On the host: a device would draw keys of its own.
    generator = torch.Generator().manual_seed(_SEED)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK,), generator=generator)
    return keys.to(device)
