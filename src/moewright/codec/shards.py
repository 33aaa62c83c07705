"""Where the shards of a stream of tokens lie: `<prefix>-00000`, `<prefix>-00001` and so on.

`<prefix>.shards.json` says how many there are. Megatron-LM knows pairs of files alone: for it each
shard is a corpus of a blend. Without weights it would stop after one pass over the blend, hence
each has its share of the tokens as its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.codec.data_paths import WeightedPath, format_data_paths, parse_data_paths
from moewright.codec.files import read_json
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardList:
    """The content of `<prefix>.shards.json`."""

    shards: int
    documents: int
    tokens: int


def shard_list_path(prefix: Path) -> Path:
    """Return the file that says how many shards a stream has."""
    return prefix.with_name(f"{prefix.name}.shards.json")


def shard_prefix(prefix: Path, number: int) -> Path:
    """Return the prefix of the pair of a shard, counted from 0."""
    return prefix.with_name(f"{prefix.name}-{number:05d}")


def name_shards(plan: Plan) -> Plan:
    """Return a plan whose data names every shard that lies here as a corpus of its own.

    Raises:
        BadInput: a shard is missing, or the list of them is damaged.
    """
    data = plan.workload.data
    train, heldout = (_expand(text) for text in (data.train, data.heldout))
    data = replace(data, train=train, heldout=heldout)
    return replace(plan, workload=replace(plan.workload, data=data))


def _expand(text: str) -> str:
    parts = parse_data_paths(text)
    if not any(shard_list_path(Path(part.path)).is_file() for part in parts):
        return text
    return format_data_paths([shard for part in parts for shard in _split(part)])


def _split(part: WeightedPath) -> Iterator[WeightedPath]:
    """Yield the shards of a corpus, each with its part of the corpus's share."""
    prefix = Path(part.path)
    path = shard_list_path(prefix)
    if not path.is_file():
        yield replace(part, weight=f"{part.share:.6g}")
        return
    listed = read_json(ShardList, path)
    prefixes = [shard_prefix(prefix, number) for number in range(listed.shards)]
    try:
        sizes = [Path(f"{shard}.bin").stat().st_size for shard in prefixes]
    except OSError as error:
        rule = f"names {listed.shards} shards, of which one is missing: {error.filename}"
        raise BadInput(Reason(field=str(path), rule=rule)) from None
    for shard, size in zip(prefixes, sizes, strict=True):
        share = part.share * size / max(1, sum(sizes))
        yield WeightedPath(path=str(shard), share=share, weight=f"{share:.6g}")
