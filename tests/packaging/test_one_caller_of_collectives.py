"""One module of the engine calls collectives; the others name types of torch.distributed alone.

An import contract cannot say it: it knows external packages whole, and torch is needed everywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import moewright

ENGINE = Path(moewright.__file__).parent / "engine"
CALLER = "comm/collectives.py"
# What other modules take: types, errors, stores, and torch's fully_shard, whose collectives the
# engine replaces by its own.
NAMES_TAKEN = {
    "comm/mesh.py": {"ProcessGroup"},
    "checkpoint/planning.py": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "DefaultSavePlanner", "LoadItemType",
        "LoadPlan", "LoadPlanner", "Metadata", "MetadataIndex", "ReadItem", "SavePlan",
        "SavePlanner", "TensorProperties", "TensorStorageMetadata", "TensorWriteData",
        "WriteItem", "WriteItemType", "create_read_items_for_chunk_list",
    },
    "optim/fsdp.py": {
        "CPUOffloadPolicy", "DTensor", "DeviceMesh", "FSDPModule",
        "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard",
    },
    "run/rendezvous.py": {"DistError", "DistNetworkError", "DistStoreError"},
    "torch_private.py": {
        "AllGather", "FSDPModule", "FileStore", "PrefixStore", "ProcessGroup", "ReduceScatter",
        "Store", "TCPStore", "_fsdp_api",
    },
    "torch_dist/export_weights.py": {  # writes alone, without a process group
        "ChunkStorageMetadata", "DefaultSavePlanner", "FileSystemWriter", "MetadataIndex",
        "SavePlan", "TensorProperties", "TensorWriteData", "WriteItem", "WriteItemType", "save",
    },
}  # fmt: skip


def test_one_module_calls_collectives() -> None:
    strays = []
    for path in sorted(ENGINE.rglob("*.py")):
        name = path.relative_to(ENGINE).as_posix()
        if name != CALLER:
            taken = set(_list_names(ast.parse(path.read_text("utf-8"))))
            surplus = taken - NAMES_TAKEN.get(name, set())
            strays += [f"{name}: {word}" for word in sorted(surplus)]
    assert not strays


def _list_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module takes from torch.distributed and from the C library below it."""
    aliases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if _is_distributed(node.module):
                yield from (alias.name for alias in node.names)
            elif node.module == "torch":
                aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_distributed(alias.name):
                    aliases.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in aliases or _is_distributed(owner) or owner.startswith("torch.ops.c10d"):
                yield node.attr


def _is_distributed(module: str) -> bool:
    return module.startswith(("torch.distributed", "torch._C._distributed"))
