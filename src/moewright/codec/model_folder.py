"""The name of a model by the folder that holds it."""

from __future__ import annotations

from pathlib import Path


def name_model(folder: Path) -> str:
    """Return the name of a folder, or the id of a model in the hub's cache.

    There Qwen/Qwen3-30B-A3B lies in models--Qwen--Qwen3-30B-A3B/snapshots/<revision>.
    """
    folder = folder.resolve()
    model = folder.parent.parent.name
    if folder.parent.name == "snapshots" and model.startswith("models--"):
        return model.removeprefix("models--").replace("--", "/")
    return folder.name
