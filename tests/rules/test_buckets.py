import numpy as np
import pytest

from moewright.rules.shapes.buckets import (
    Bucket,
    BucketEntry,
    offloaded_numel,
    plan_buckets,
    shard_range,
)
from moewright.spec.errors import BadInput


def test_whole_blocks_of_a_shard_are_offloaded() -> None:
    numels = [offloaded_numel(1000, fraction) for fraction in (1e-6, 0.25, 0.5, 0.999, 1.0)]
    assert numels == [64, 256, 512, 1000, 1000]
    assert offloaded_numel(np.array([1000, 64]), 0.5).tolist() == [512, 64]


def test_starts_are_aligned_and_the_end_is_padded() -> None:
    (bucket,) = plan_buckets([("c", 100), ("b", 64), ("a", 1)], shards=3, bucket_elements=10_000)
    assert bucket.entries == (
        BucketEntry(name="c", start=0, numel=100),
        BucketEntry(name="b", start=128, numel=64),
        BucketEntry(name="a", start=192, numel=1),
    )
    assert bucket.numel == 384  # 193 up to a multiple of lcm(3, 128)
    assert [shard_range(bucket, 3, index) for index in range(3)] == [
        (0, 128),
        (128, 256),
        (256, 384),
    ]


def test_a_bucket_closes_once_it_holds_enough_gaps_included() -> None:
    params = [(name, 100) for name in "abcde"]  # ends at 100, 228, 356
    assert [len(b.entries) for b in plan_buckets(params, shards=1, bucket_elements=229)] == [3, 2]
    assert [len(b.entries) for b in plan_buckets(params, shards=1, bucket_elements=228)] == [
        2,
        2,
        1,
    ]
    assert [len(b.entries) for b in plan_buckets(params, shards=1, bucket_elements=1)] == [1] * 5


def test_nothing_to_lay_out() -> None:
    assert plan_buckets([], shards=8, bucket_elements=100) == ()


@pytest.mark.parametrize(
    "kwargs", [{"shards": 0, "bucket_elements": 1}, {"shards": 1, "bucket_elements": 0}]
)
def test_sizes_below_one_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        plan_buckets([("a", 1)], **kwargs)
    with pytest.raises(BadInput, match="at least one element"):
        plan_buckets([("a", 0)], shards=1, bucket_elements=1)


@pytest.mark.parametrize(("shards", "index"), [(3, 0), (2, 2), (2, -1)])
def test_a_shard_that_is_none(shards: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"shard {index} of {shards}"):
        shard_range(Bucket(entries=(), numel=128), shards, index)
