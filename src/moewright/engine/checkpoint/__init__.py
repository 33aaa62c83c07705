"""Checkpoints that any layout writes and any other reads: JSON index, safetensors payload, no
pickle either way."""

from moewright.engine.checkpoint.commit import (
    Order,
    checkpoint_at,
    checkpoint_path,
    committed,
    latest,
    resume_from,
    write_alone,
)
from moewright.engine.checkpoint.coordinator import Coordinator, agree, alone
from moewright.engine.checkpoint.files import (
    PayloadReader,
    Row,
    flush_directory,
    require_space,
    verify_file,
    write_fault,
    write_tensors,
    write_text,
)
from moewright.engine.checkpoint.geometry import boxes
from moewright.engine.checkpoint.index import Index, Shard, TensorEntry, payload_name, read_index
from moewright.engine.checkpoint.load import load, read_box, refuse_mismatch
from moewright.engine.checkpoint.lock import run_lock
from moewright.engine.checkpoint.piece import DTYPES, Piece, flat_pieces
from moewright.engine.checkpoint.saver import Saver, save

__all__ = [
    "DTYPES",
    "Coordinator",
    "Index",
    "Order",
    "PayloadReader",
    "Piece",
    "Row",
    "Saver",
    "Shard",
    "TensorEntry",
    "agree",
    "alone",
    "boxes",
    "checkpoint_at",
    "checkpoint_path",
    "committed",
    "flat_pieces",
    "flush_directory",
    "latest",
    "load",
    "payload_name",
    "read_box",
    "read_index",
    "refuse_mismatch",
    "require_space",
    "resume_from",
    "run_lock",
    "save",
    "verify_file",
    "write_alone",
    "write_fault",
    "write_tensors",
    "write_text",
]
