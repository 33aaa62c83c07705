"""Weights in 8 bits with a factor a block: every box is what they stand for; faults are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_families import write_fp8, write_model, write_published_v4
from moewright.cli.main import main
from moewright.engine.hf.packed import FP4, FP8, StoredTensor, unpack

SIZES = (2, 300, 150)  # experts, rows and columns, the last blocks of 128 cut off
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def slices_of(size: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(
        lambda ends: slice(min(ends), max(ends))
    )


@given(box=st.tuples(*map(slices_of, SIZES)), dims=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_box_is_that_of_the_whole(box: tuple[slice, ...], dims: int) -> None:
    """A power of two for every block says which one each value was multiplied by."""
    ones = torch.ones(SIZES).to(torch.float8_e4m3fn)
    tensors = {"x": ones, "x_scale_inv": 2.0 ** torch.arange(12).view(2, 3, 2)}
    expert, row, column = torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
    expected = 2.0 ** (6 * expert + 2 * (row >= 128) + 2 * (row >= 256) + (column >= 128))
    stored = StoredTensor(file="", dtype=FP8, shape=SIZES, block=(128, 128), factors="x_scale_inv")
    result = unpack("x", stored, box[:dims], lambda name, part: tensors[name][part])
    assert torch.equal(result, expected[box[:dims]])


@given(box=st.tuples(slices_of(3), slices_of(64)), dims=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_any_box_of_four_bits_is_that_of_the_whole(box: tuple[slice, ...], dims: int) -> None:
    """Every code once, and powers of two that differ by row and block."""
    codes = torch.arange(16).repeat(12).view(3, 64)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    powers = 2.0 ** torch.arange(6).view(3, 2)
    tensors = {"x.weight": packed, "x.scale": powers.to(torch.float8_e8m0fnu)}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = values[codes] * powers.repeat_interleave(32, 1)
    stored = StoredTensor(file="", dtype=FP4, shape=(3, 64), block=(1, 32), factors="x.scale")
    result = unpack("x.weight", stored, box[:dims], lambda name, part: tensors[name][part])
    assert torch.equal(result, expected[box[:dims]])


V4_SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "o_lora_rank": 16}
V4_SIZES |= {"vocab_size": 64, "index_head_dim": 16}


def test_published_deepseek_v4_is_what_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of 4 bits and blocks of 8, under published names, as transformers widens them."""
    transformers = pytest.importorskip("transformers")
    write_model("deepseek_v4", tmp_path / "wide", dtype=torch.bfloat16, **V4_SIZES)
    write_published_v4(tmp_path / "wide", tmp_path / "hf", 16)
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", ours)) == 0
    assert main(("convert", "export", ours, "--out", back, "--dtype", "fp32")) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    widened = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    expected = load(tmp_path / "hf", quantization_config=widened, dtype=torch.float32)
    actual = load(tmp_path / "back", dtype=torch.float32)
    wide = load(tmp_path / "wide", dtype=torch.float32).state_dict()
    packed = 0
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], tensor), name
        packed += not torch.equal(wide[name], tensor)
    assert packed == 4 * (5 + 3 + 2) + 2  # attention, shared and routed experts, and two indexers
    path = tmp_path / "hf" / "model.safetensors"
    before = load_file(path)
    expert, shared = "layers.1.ffn.experts.2.w2", "layers.1.ffn.shared_experts.w1"
    for changed, message in (
        ({f"{expert}.scale": None}, f"{expert}.weight: has two values of 4 bits a byte"),
        ({f"{expert}.scale": torch.ones(64, 1)}, "needs a F8_E8M0 for 32 in a row"),
        ({f"{shared}.weight": None}, f"{shared}.scale: has no tensor {shared}.weight of F8_E4M3"),
        ({f"{shared}.scale": None}, "needs rows, columns, and factors"),
    ):
        tensors: dict[str, torch.Tensor | None] = {**before, **changed}
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
        capsys.readouterr()
        assert main(("convert", "import", str(tmp_path / "hf"), "--out", ours + "2")) == 2
        assert message in capsys.readouterr().err


def test_an_import_is_what_the_blocks_stand_for(tmp_path: Path) -> None:
    """It is equal in fp32 bit for bit, and is bf16 without scales where no dtype is given."""
    write_model("deepseek_v3", tmp_path / "wide")
    expected = write_fp8(tmp_path / "wide", tmp_path / "hf", (10, 12))
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours"))) == 0
    for name, more, dtype in (
        ("fp32", ("--dtype", "fp32"), torch.float32),
        ("bf16", (), torch.bfloat16),
    ):
        assert (
            main(
                ("convert", "export", str(tmp_path / "ours"), "--out", str(tmp_path / name), *more)
            )
            == 0
        )
        result = load_file(tmp_path / name / "model.safetensors")
        assert result.keys() == expected.keys()
        for tensor, value in expected.items():
            kept_wide = tensor.endswith("e_score_correction_bias")
            assert torch.equal(result[tensor], value if kept_wide else value.to(dtype)), tensor
        assert "quantization_config" not in json.loads(
            (tmp_path / name / "config.json").read_text()
        )


def test_blocks_that_divide_a_tensor_are_scaled_as_transformers_does() -> None:
    rule = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    dice = torch.Generator().manual_seed(5)
    for shape in ((256, 384), (3, 256, 128)):
        values = (torch.randn(shape, generator=dice) * 50).to(torch.float8_e4m3fn)
        factors = torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128, generator=dice)
        for stored_factors in (factors, factors.bfloat16()):
            tensors = {"x": values, "x_scale_inv": stored_factors}
            stored = StoredTensor(
                file="", dtype=FP8, shape=shape, block=(128, 128), factors="x_scale_inv"
            )
            result = unpack("x", stored, (), lambda name, box, tensors=tensors: tensors[name][box])
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(
                    result.to(dtype), rule._dequantize_one(values, stored_factors, dtype)
                )


def test_what_is_wrong_with_scales_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("deepseek_v3", tmp_path / "wide")
    write_fp8(tmp_path / "wide", tmp_path / "hf", (10, 12))
    path = tmp_path / "hf" / "factors.safetensors"
    index = tmp_path / "hf" / "model.safetensors.index.json"
    before = load_file(path)
    placed = json.loads(index.read_text())["weight_map"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    factors = f"{EXPERT}_scale_inv"
    norm = "model.layers.0.input_layernorm.weight_scale_inv"

    def refused(changed: dict[str, torch.Tensor | None], block: object = (10, 12)) -> str:
        stored = {
            name: tensor for name, tensor in {**before, **changed}.items() if tensor is not None
        }
        save_file(stored, path)
        kept = {name: file for name, file in placed.items() if file != path.name} | dict.fromkeys(
            stored, path.name
        )
        index.write_text(json.dumps({"weight_map": kept}))
        written = {**config, "quantization_config": {"weight_block_size": block}}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(written))
        assert (
            main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours"))) == 2
        )
        return capsys.readouterr().err

    assert f"{EXPERT}: is of F8_E4M3 and needs rows, columns, and factors {factors}" in refused(
        {factors: None}
    )
    assert f"{norm}: has no tensor {norm.removesuffix('_scale_inv')} of F8_E4M3" in refused(
        {norm: torch.ones(1)}
    )
    orphan = "model.layers.7.mlp.gate_proj.weight_scale_inv"
    assert f"{orphan}: has no tensor {orphan.removesuffix('_scale_inv')} of F8_E4M3" in refused(
        {orphan: torch.ones(1, 1).to(torch.float8_e4m3fn)}
    )
    assert f"{factors}: has shape [4, 1], blocks of [10, 12] make [4, 2]" in refused(
        {factors: torch.ones(4, 1)}
    )
    assert f"{factors}: is of F64; known are F32, BF16" in refused(
        {factors: before[factors].double()}
    )
    for block in (None, [10], [10, 0], [10, "12"], 10):
        assert "config.json gives no quantization_config.weight_block_size" in refused({}, block)
    assert not (tmp_path / "ours").exists()
