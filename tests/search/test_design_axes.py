"""Axes of designs: which shapes they yield, what laws see of them, what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import moewright as mw
from moewright.cost.loss_laws import describe_shape
from moewright.cost.serving import cache_bytes_per_token
from moewright.intake import catalogue
from moewright.intake.hf import build_config, parse_config
from moewright.search.design import DesignGoal, ShapeAxes, describe_like, list_shapes
from moewright.spec.model import AttentionKind, ModelSpec

LIKE = "Qwen3-30B-A3B"
ALL_AXES = ShapeAxes(
    attention=(AttentionKind.GQA, AttentionKind.MLA), kv_heads=(2, 8), vocab_sizes=(65_536, 151_936)
)


@cache
def list_plain(like: str = LIKE) -> tuple[ModelSpec, ...]:
    goal = DesignGoal(most_total=8e8 if like == LIKE else 1e9)
    return tuple(list_shapes(catalogue.model(like), goal, ShapeAxes()))


def list_variants(axes: ShapeAxes, like: str = LIKE) -> list[ModelSpec]:
    return [variant for shape in list_plain(like) for variant in axes.vary(shape)]


@pytest.mark.thorough
def test_without_axes_shapes_keep_the_attention_and_the_vocabulary_of_the_model() -> None:
    base = catalogue.model(LIKE)
    assert list_variants(ShapeAxes()) == list(list_plain())
    for shape in list_plain():
        assert shape.attention.kv_heads == base.attention.kv_heads
        assert shape.vocab_size == base.vocab_size
        assert describe_like(shape, base, 1e11) == describe_shape(shape, 1e11)


def test_every_variant_has_a_name_of_its_own_and_a_config_that_is_read_back() -> None:
    shapes = list_variants(ALL_AXES)
    assert len({shape.name for shape in shapes}) == len(shapes)
    read = {}
    for shape in shapes:
        same = (shape.family, shape.attention, shape.vocab_size)
        read[same] = parse_config(build_config(shape), where="", name=shape.name), shape
    assert len({family for family, _, _ in read}) == 2
    for model, shape in read.values():
        assert model == shape


def test_laws_see_no_attention_and_no_vocabulary() -> None:
    base = catalogue.model(LIKE)
    for plain in list_plain():
        for shape in ALL_AXES.vary(plain):
            assert describe_like(shape, base, 1e11) == describe_shape(plain, 1e11)


@pytest.mark.thorough
def test_laws_see_shared_experts() -> None:
    base = catalogue.model("DeepSeek-V2-Lite")
    shapes = list_variants(ShapeAxes(shared_experts=(0, 1, 3)), base.name)
    shares = {describe_like(shape, base, 1e11).shared_share for shape in shapes}
    assert min(shares) == 0
    assert len(shares) >= 3


def test_fewer_heads_of_keys_and_latent_ones_have_smaller_caches() -> None:
    shapes = {shape.name: shape for shape in list_variants(ALL_AXES)}
    grouped = [name for name in shapes if "-gqa-kv8" in name]
    assert grouped
    for name in grouped:
        eight = cache_bytes_per_token(shapes[name])
        assert cache_bytes_per_token(shapes[name.replace("-kv8", "-kv2")]) == eight / 4
        # 512 + 64 in place of 2 x 8 x 128.
        latent = shapes[name.replace("-gqa-kv8", "-mla")]
        assert cache_bytes_per_token(latent) == eight * 576 / 2048


@pytest.mark.thorough
def test_a_design_says_what_laws_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    from moewright.cli.main import main

    goal = ["--on", "8xH100", "--tokens", "100B", "--max-total", "700M"]
    axes = ["--attention-kinds", "gqa", "mla", "--vocab-sizes", "65536"]
    assert main(["design", *goal, *axes]) == 0
    output = capsys.readouterr().out
    assert "No loss law knows attention or vocabulary" in " ".join(output.split())
    assert "-v65536" in output
    assert "65,536" in output


@pytest.mark.parametrize(
    ("choices", "rule"),
    [
        ({"attention_kinds": ("linear",)}, "--attention-kinds=linear.*gqa or mla"),
        ({"attention_kinds": ("gqa",), "like": "DeepSeek-V2-Lite"}, "--attention-kinds=gqa.*mla"),
        ({"kv_heads": (4,), "like": "DeepSeek-V2-Lite"}, "--kv-heads.*no groups of heads"),
        (
            {"kv_heads": (4,), "attention_kinds": ("mla",)},
            "--kv-heads.*gqa among",
        ),
        ({"kv_heads": (0,)}, r"--kv-heads=0.*1\.\.32"),
        ({"vocab_sizes": (3,)}, r"--vocab-sizes=3.*256\.\."),
        ({"shared_experts": (1,)}, "--shared-experts.*no shared experts"),
        ({"shared_experts": (99,), "like": "DeepSeek-V2-Lite"}, r"--shared-experts=99.*0\.\.16"),
    ],
)
def test_axes_that_a_model_cannot_have_are_refused(choices: dict[str, Any], rule: str) -> None:
    with pytest.raises(mw.BadInput, match=rule):
        mw.design(on="8xH100", days=3.0, **choices)
