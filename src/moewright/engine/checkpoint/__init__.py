"""Checkpoints that any layout writes and any other reads: JSON index, safetensors payload, no pickle either way."""

from moewright.engine.checkpoint.commit import checkpoint_at, committed, latest, resume_from
from moewright.engine.checkpoint.coordinator import Coordinator, alone
from moewright.engine.checkpoint.files import require_space
from moewright.engine.checkpoint.geometry import boxes
from moewright.engine.checkpoint.index import Index, read_index
from moewright.engine.checkpoint.load import load, refuse_mismatch
from moewright.engine.checkpoint.lock import run_lock
from moewright.engine.checkpoint.piece import Piece, flat_pieces
from moewright.engine.checkpoint.saver import Saver, save

__all__ = [
    "Coordinator",
    "Index",
    "Piece",
    "Saver",
    "alone",
    "boxes",
    "checkpoint_at",
    "committed",
    "flat_pieces",
    "latest",
    "load",
    "read_index",
    "refuse_mismatch",
    "require_space",
    "resume_from",
    "run_lock",
    "save",
]
