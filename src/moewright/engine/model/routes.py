"""Routes: the experts that every token took, recorded in a folder and taken again in any layout.

A folder of routes holds routes.json, which says of what they are, and a file a routed layer,
`layer00003.bin`: [sequences, seq_len, top_k] in the order of training, each entry an expert's
number plus one, little-endian of one byte up to 255 experts and of two beyond; 0 is not recorded. A
token's place depends on its number over all of training alone, and not on the layout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moewright.codec import read_json, write_json
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

MANIFEST_FILE = "routes.json"
_ONE_BYTE = 255  # experts that one byte numbers, beside 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesManifest:
    """What a folder of routes is of; `data` is the fingerprint of the tokens, "" of any."""

    experts: int
    top_k: int
    seq_len: int
    layers: tuple[int, ...]
    seed: int = 0
    data: str = ""


def build_manifest(model: ModelSpec, workload: Workload, data: str) -> RoutesManifest:
    """Return the manifest of a job's routes; `data` is the fingerprint of its tokens."""
    assert model.moe is not None  # what a model with routes has
    return RoutesManifest(
        experts=model.moe.experts,
        top_k=model.moe.router.top_k,
        seq_len=workload.seq_len,
        layers=model.routed_layers,
        seed=workload.seed,
        data=data,
    )


def prepare_routes(model: ModelSpec, workload: Workload, data: str) -> None:
    """Check a folder of routes to be replayed, and begin one that is recorded.

    Raises:
        BadInput: the routes are of another model or other data, or there are none.
    """
    routes = workload.routes
    folders = {"record": routes.record_routes, "replay": routes.replay_routes}
    for key, path in folders.items():
        if path and model.moe is None:
            rule = "the model has no experts"
            raise BadInput(Reason(field=f"train.{key}_routes", value=path, rule=rule))
    if routes.replay_routes:
        _require_equal(Path(routes.replay_routes), build_manifest(model, workload, data))
    if routes.record_routes:
        folder = Path(routes.record_routes)
        manifest = build_manifest(model, workload, data)
        if (folder / MANIFEST_FILE).exists():
            _require_equal(folder, manifest)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MANIFEST_FILE, manifest)


def _require_equal(folder: Path, expected: RoutesManifest) -> None:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="no such file: the folder holds no routes"))
    stored = read_json(RoutesManifest, path)
    for name in ("experts", "top_k", "seq_len", "layers", "seed", "data"):
        value, wanted = getattr(stored, name), getattr(expected, name)
        if value != wanted and (stored.data or name not in ("seed", "data")):
            rule = f"the routes are of another job, which has {name}={wanted}"
            raise BadInput(Reason(field=f"{path}: {name}", value=str(value), rule=rule))


class LayerRoutes:
    """The routes of one layer in a folder, read and written by the numbers of tokens."""

    def __init__(self, folder: Path, layer: int, *, experts: int, top_k: int) -> None:
        self._path = folder / f"layer{layer:05d}.bin"
        self._dtype = np.dtype("u1" if experts <= _ONE_BYTE else "<u2")
        self._top_k = top_k
        self._row_bytes = top_k * self._dtype.itemsize
        self._file: int | None = None

    def write(self, numbers_t: torch.Tensor, experts_tk: torch.Tensor) -> None:
        """Write the experts [t,k] of tokens by their numbers [t]."""
        rows = (experts_tk.cpu().numpy() + 1).astype(self._dtype)
        file = self._open(os.O_RDWR | os.O_CREAT)
        for start, stop, number in _runs(numbers_t):
            # By position, because ranks write the same file at the same time.
            os.pwrite(file, rows[start:stop].tobytes(), number * self._row_bytes)

    def read(self, numbers_t: torch.Tensor) -> torch.Tensor:
        """Return the experts [t,k] int64 of tokens.

        Raises:
            BadInput: some token has none.
        """
        rows = np.zeros((len(numbers_t), self._top_k), self._dtype)
        file = self._open(os.O_RDONLY)
        for start, stop, number in _runs(numbers_t):
            wanted = (stop - start) * self._row_bytes
            # What lies beyond the end of the file is not recorded.
            stored = os.pread(file, wanted, number * self._row_bytes).ljust(wanted, b"\0")
            rows[start:stop] = np.frombuffer(stored, self._dtype).reshape(-1, self._top_k)
        if not rows.all():
            number = int(numbers_t[int((rows == 0).any(1).argmax())])
            rule = f"holds no route of token {number:,} of the run"
            raise BadInput(Reason(field=str(self._path), rule=rule))
        return torch.from_numpy(rows.astype(np.int64) - 1)

    def _open(self, flags: int) -> int:
        if self._file is None:
            try:
                self._file = os.open(self._path, flags, 0o644)
            except FileNotFoundError:
                rule = "no such file: the layer has no routes"
                raise BadInput(Reason(field=str(self._path), rule=rule)) from None
        return self._file


def _runs(numbers_t: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (start, stop, number of the first) of each run of consecutive numbers."""
    numbers = numbers_t.cpu().numpy()
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()]
    stops = [*starts[1:], len(numbers)]
    return [(a, b, int(numbers[a])) for a, b in zip(starts, stops, strict=True)]
