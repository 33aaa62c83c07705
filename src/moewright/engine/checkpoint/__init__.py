"""Checkpoints that any layout writes and any other reads.

The index is JSON, the payload is safetensors; there is no pickle either way.
"""

from moewright.engine.checkpoint.commit import (
    SaveRequest,
    checkpoint_path,
    find_checkpoint,
    find_latest,
    find_resume_point,
    latest_step,
    list_checkpoints,
    write_single_process,
)
from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks, single_process
from moewright.engine.checkpoint.files import (
    PayloadReader,
    TensorHeader,
    fsync_directory,
    require_space,
    verify_file,
    write_error,
    write_tensors,
    write_text,
)
from moewright.engine.checkpoint.index import (
    CheckpointIndex,
    StoredShard,
    TensorEntry,
    payload_file_name,
    read_index,
)
from moewright.engine.checkpoint.loader import (
    find_readable,
    load_checkpoint,
    offer_older,
    put_damaged_aside,
    read_index_on_all_ranks,
    read_newest_index,
    read_tensor_box,
    refuse_mismatch,
)
from moewright.engine.checkpoint.local_shard import (
    SAFETENSORS_DTYPES,
    LocalShard,
    flat_range_boxes,
    flat_range_shards,
    whole_shard,
)
from moewright.engine.checkpoint.remote import fetch_newer, probe_copies
from moewright.engine.checkpoint.saver import CheckpointSaver, save_checkpoint

__all__ = [
    "SAFETENSORS_DTYPES",
    "CheckpointIndex",
    "CheckpointSaver",
    "Coordinator",
    "LocalShard",
    "PayloadReader",
    "SaveRequest",
    "StoredShard",
    "TensorEntry",
    "TensorHeader",
    "checkpoint_path",
    "fetch_newer",
    "find_checkpoint",
    "find_latest",
    "find_readable",
    "find_resume_point",
    "flat_range_boxes",
    "flat_range_shards",
    "fsync_directory",
    "latest_step",
    "list_checkpoints",
    "load_checkpoint",
    "offer_older",
    "payload_file_name",
    "probe_copies",
    "put_damaged_aside",
    "read_index",
    "read_index_on_all_ranks",
    "read_newest_index",
    "read_tensor_box",
    "refuse_mismatch",
    "require_space",
    "run_on_all_ranks",
    "save_checkpoint",
    "single_process",
    "verify_file",
    "whole_shard",
    "write_error",
    "write_single_process",
    "write_tensors",
    "write_text",
]
