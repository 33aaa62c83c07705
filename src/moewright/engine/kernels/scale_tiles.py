"""The order in which tensor cores read the scales of blocks of 32 or 16 numbers.

They lie in tiles of 128 rows and 4 blocks, tile after tile along a row; in a tile the scales of
rows r, r + 32, r + 64 and r + 96 lie beside each other, 4 blocks of each. (cuBLAS manual, 1D block
scaling factors layout.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS = 128  # of a tile, which tensor cores read at once
TILE_BLOCKS = 4  # of a row of a tile
_TILE_LANES = 32  # rows of a quarter of a tile
_LANE_GROUPS = TILE_ROWS // _TILE_LANES


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of 8 bits [R, blocks] in tiles, flat; what a tile lacks is zero."""
    rows, blocks = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    lanes = padded.unflatten(1, (-1, TILE_BLOCKS)).unflatten(0, (-1, _LANE_GROUPS, _TILE_LANES))
    return lanes.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def untile_scales(tiles: torch.Tensor) -> torch.Tensor:
    """Return scales [R, blocks] that lie in whole tiles row after row."""
    rows, blocks = tiles.shape
    down, along = rows // TILE_ROWS, blocks // TILE_BLOCKS
    shape = down, along, _TILE_LANES, _LANE_GROUPS, TILE_BLOCKS
    lanes = tiles.view(torch.uint8).reshape(shape).permute(0, 3, 2, 1, 4)
    return lanes.reshape(rows, blocks).view(tiles.dtype)
