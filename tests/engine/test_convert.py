"""`moewright convert`: what goes in comes out byte for byte, and what is wrong is named."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_jobs
from docs.tools import families
from hf_families import (
    FAMILIES,
    LING_SOURCES,
    NESTED,
    transpose_experts,
    write_fused_experts,
    write_ling,
    write_model,
)
from moewright.cli.main import main
from moewright.engine.checkpoint import read_index
from moewright.engine.hf import candidates, import_weights
from moewright.engine.run.companions import _write_card
from moewright.families.weight_names import USUAL_LAYER_NAMES, NamePattern, whole
from moewright.intake.hf import read_config
from moewright.spec.errors import BadInput
from moewright.spec.workload import BatchRampSpec, DataSpec

transformers = pytest.importorskip("transformers")


def round_trip(source: Path, folder: Path) -> Path:
    assert main(("convert", "import", str(source), "--out", str(folder / "ours"))) == 0
    assert main(("convert", "export", str(folder / "ours"), "--out", str(folder / "back"))) == 0
    return folder / "back"


def assert_same_bytes(result: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in result.iterdir()} == names
    for name in names:
        assert (result / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_bytes(family: str, tmp_path: Path) -> None:
    """Weights are bf16 (DeepSeek-V3's selection biases fp32), in shards that cut through layers."""
    write_model(family, tmp_path / "hf", dtype=torch.bfloat16, shard_bytes=20_000)
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")


def test_every_family_whose_weights_go_out_is_compared_with_transformers() -> None:
    """Kimi-K2 is DeepSeek-V3, Mistral is Llama with a window, and Qwen2 is Qwen3 without norms.

    Ling and Qwen3-VL are compared in tests/spawn/test_verify_families.py.
    """
    rows = families.list_families()
    written = {row.family for row in rows if row.has_weights}
    elsewhere = {"bailing_moe", "bailing_moe_v2", "qwen3_vl_moe_text"}
    compared = {*FAMILIES, *elsewhere} & {row.family for row in rows}
    assert written - {"kimi_k2", "mistral", "qwen2"} == compared
    assert all(set(row.models) - set(row.lacking) for row in rows if row.family in FAMILIES)


def test_fused_experts_and_names_of_later_dialects(tmp_path: Path) -> None:
    write_model("qwen3_moe", tmp_path / "apart")
    (tmp_path / "fused").mkdir()
    write_fused_experts(tmp_path / "apart", tmp_path / "fused")
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    rope = config.pop("rope_parameters")  # the older dialect
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "fused").attention == read_config(tmp_path / "apart").attention
    back = round_trip(tmp_path / "fused", tmp_path)
    assert (back / "config.json").read_bytes() == (tmp_path / "fused" / "config.json").read_bytes()
    result = load_file(back / "model.safetensors")
    expected = load_file(tmp_path / "fused" / "model.safetensors")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_a_history_is_loaded_by_transformers(
    family: str, tmp_path: Path
) -> None:
    """With a dtype given, names, shards and config.json are made anew, as for a run."""
    write_model(family, tmp_path / "hf")
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours"))) == 0
    assert (
        main(
            (
                "convert",
                "export",
                str(tmp_path / "ours"),
                "--out",
                str(tmp_path / "new"),
                "--dtype",
                "fp32",
            )
        )
        == 0
    )
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(5))
    logits = []
    for folder in ("hf", "new"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_packed_experts_are_what_transformers_unpacks(tmp_path: Path) -> None:
    """MXFP4, as gpt-oss is published, comes back in bf16, which holds it exactly."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    write_model("gpt_oss", tmp_path / "hf", hidden_size=64, intermediate_size=32)
    path = tmp_path / "hf" / "model.safetensors"
    stored = load_file(path)
    dice = torch.Generator().manual_seed(3)
    expected = {}
    for name in [
        name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inner, rows = stored.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, inner // 32, 16), generator=dice, dtype=torch.uint8
        )
        scales = torch.randint(119, 125, blocks.shape[:3], generator=dice, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(stored, path)
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours"))) == 0
    assert (
        main(
            (
                "convert",
                "export",
                str(tmp_path / "ours"),
                "--out",
                str(tmp_path / "new"),
                "--dtype",
                "bf16",
            )
        )
        == 0
    )
    result = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "new" / "config.json").read_text())
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, path)
    with pytest.raises(
        BadInput, match=r"layers.1.mlp.experts.down_proj_blocks: needs 16 bytes a block"
    ):
        import_weights.plan_import(
            tmp_path / "hf", read_config(tmp_path / "hf"), tmp_path / "other"
        )


def test_depths_that_no_config_names_go_there_and_back(tmp_path: Path) -> None:
    """Published folders of Qwen3-Next hold an MTP depth that transformers does not read."""
    write_model("qwen3_next", tmp_path / "hf", dtype=torch.bfloat16)
    path = tmp_path / "hf" / "model.safetensors"
    extra = {"mtp.norm.weight": torch.ones(8), "mtp.layers.0.mlp.gate.weight": torch.ones(2, 8)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")


def test_a_hybrid_as_it_is_published_goes_there_and_back(tmp_path: Path) -> None:
    """With a letter a layer, an infinite bound of steps that is no JSON, and depths of MTP.

    Both depths have the weights of one, whose two blocks are numbered by themselves.
    """
    blocks = ["mamba", "mlp", "attention", "moe"]
    write_model("nemotron_h", tmp_path / "hf", dtype=torch.bfloat16, layers_block_type=blocks)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {
        "hybrid_override_pattern": "M-*E",
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 2,
        "time_step_limit": [0.0, math.inf],
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config, indent=2))
    path = tmp_path / "hf" / "model.safetensors"
    stored = load_file(path)
    hidden = stored["backbone.norm_f.weight"]
    depth = {
        name.replace(f"backbone.layers.{layer}.", f"mtp.layers.{block}."): tensor.flip(0)
        for block, layer in enumerate((2, 3))
        for name, tensor in stored.items()
        if name.startswith(f"backbone.layers.{layer}.")
    }
    depth["mtp.layers.0.eh_proj.weight"] = torch.cat((hidden, hidden)).expand(len(hidden), -1)
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        depth[f"mtp.layers.{name}.weight"] = torch.rand(len(hidden)).to(hidden.dtype)
    depth = {name: tensor.contiguous() for name, tensor in depth.items()}
    save_file({**stored, **depth}, path, metadata={"format": "pt"})
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")
    names = {tensor.name for tensor in read_index(tmp_path / "ours" / "step-00000000").tensors}
    depth_names = {name for name in names if name.startswith("mtp.")}
    assert len(depth_names) == 17
    assert "layers.5.moe.router.selection_bias" in names - depth_names


@pytest.mark.parametrize("family", NESTED)
def test_folders_that_see_come_back_whole(family: str, tmp_path: Path) -> None:
    """What sees lies beside the language model, in the checkpoint and in another dtype too."""
    hf_dir = tmp_path / "hf"
    write_model(family, hf_dir, dtype=torch.bfloat16, shard_bytes=20_000)
    assert_same_bytes(round_trip(hf_dir, tmp_path), hf_dir)
    wide = ("--out", str(tmp_path / "new"), "--dtype", "fp32")
    assert main(("convert", "export", str(tmp_path / "ours"), *wide)) == 0
    models = []
    for folder in (hf_dir, tmp_path / "new"):
        model, info = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        models.append(model.state_dict())
    assert all(torch.equal(models[1][name], tensor) for name, tensor in models[0].items())


def test_experts_as_qwen3_vl_is_published_come_back(tmp_path: Path) -> None:
    """Their inputs are rows; transformers writes those that it made itself the other way round."""
    write_model("qwen3_vl_moe", tmp_path / "hf")
    transpose_experts(tmp_path / "hf")
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")


@pytest.mark.parametrize("source", ["glm4_moe", "granitemoeshared"])
def test_ling_goes_there_and_back(source: str, tmp_path: Path) -> None:
    """Its queries, keys and values are one tensor; made anew, names and fields are the same."""
    write_model(source, tmp_path / "source", **LING_SOURCES[source])
    write_ling(tmp_path / "source", tmp_path / "hf")
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")
    wide = ("--out", str(tmp_path / "new"), "--dtype", "fp32")
    assert main(("convert", "export", str(tmp_path / "ours"), *wide)) == 0
    stored, again = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "new"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    new, old = (replace(read_config(tmp_path / name), name="") for name in ("new", "hf"))
    assert new == old


@pytest.mark.parametrize("is_known", [True, False])
def test_published_names_of_deepseek_v4_come_back(is_known: bool, tmp_path: Path) -> None:
    """They have no prefix. An MTP depth is read; one of another form lies beside."""
    write_model("deepseek_v4", tmp_path / "hf", dtype=torch.bfloat16)
    path = tmp_path / "hf" / "model.safetensors"
    published = {}
    for name, tensor in load_file(path).items():
        own = name.removeprefix("model.").replace("embed_tokens", "embed")
        own = own.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        published[own] = tensor
        # The last layer without its compressor and indexer is a layer like that of a depth.
        if own.startswith("layers.3.") and "compressor" not in own and "indexer" not in own:
            published[own.replace("layers.3.", "mtp.0.")] = tensor.flip(0)
        if own.startswith("hc_head_"):
            published[f"mtp.0.{own}"] = tensor.flip(0)
    hidden = published["norm.weight"]
    for name in ("enorm", "hnorm", "norm"):
        published[f"mtp.0.{name}.weight"] = torch.rand(len(hidden)).to(hidden.dtype)
    for name in ("e_proj", "h_proj") if is_known else ("main_proj",):
        matrix = torch.rand(len(hidden), len(hidden)).to(hidden.dtype)
        published[f"mtp.0.{name}.weight"] = matrix
    save_file(
        {name: value.contiguous() for name, value in published.items()}, path, {"format": "pt"}
    )
    back = round_trip(tmp_path / "hf", tmp_path)
    assert_same_bytes(back, tmp_path / "hf")
    names = {tensor.name for tensor in read_index(tmp_path / "ours" / "step-00000000").tensors}
    assert ("mtp.0.embed_proj.weight" in names) == is_known
    assert ("beside.mtp.0.main_proj.weight" in names) != is_known


def test_mtp_depths_with_their_copies(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: one layer more, with copies of embedding and head."""
    write_model("deepseek_v3", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    stored = load_file(path)
    depth = {
        name.replace("layers.1.", "layers.2."): tensor.flip(0)
        for name, tensor in stored.items()
        if "layers.1." in name
    }
    depth |= {
        f"model.layers.2.{part}.weight": torch.rand(32)
        for part in ("enorm", "hnorm", "shared_head.norm")
    }
    depth["model.layers.2.eh_proj.weight"] = torch.rand(32, 64)
    depth["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    depth["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored | depth, path, {"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 1})
    )
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)
    assert_same_bytes(round_trip(tmp_path / "hf", tmp_path), tmp_path / "hf")
    stored_names = {
        tensor.name for tensor in read_index(tmp_path / "ours" / "step-00000000").tensors
    }
    assert {
        "mtp.0.proj.weight",
        "mtp.0.layer.moe.router.weight",
        "layers.3.moe.router.selection_bias",
    } <= stored_names
    depth["model.layers.2.embed_tokens.weight"][0, 0] += 1
    save_file(stored | depth, path)
    with pytest.raises(
        BadInput, match=r"embed_tokens.weight.* differs from model.embed_tokens.weight"
    ):
        import_weights.plan_import(
            tmp_path / "hf", read_config(tmp_path / "hf"), tmp_path / "other"
        )


def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model("mixtral", tmp_path / "hf", shard_bytes=20_000)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    gate = "model.layers.0.block_sparse_moe.gate.weight"

    def refused(out: str = "ours") -> str:
        assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / out))) == 2
        return capsys.readouterr().err

    def change(name: str, tensor: torch.Tensor | None) -> None:
        path = tmp_path / "hf" / data["weight_map"][name]
        stored = {**load_file(path), name: tensor}
        save_file({n: t for n, t in stored.items() if t is not None}, path)

    before = load_file(tmp_path / "hf" / data["weight_map"][expert])[expert]
    change(expert, None)
    assert f"{expert}: is missing" in refused()
    change(expert, before.double())
    assert f"{expert}: is of F64; checkpoints hold fp32" in refused()
    change(expert, before[:, :3].contiguous())
    assert f"{expert}: has shape [32, 3]" in refused()
    change(
        expert,
        before.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan"))),
    )
    assert f"{expert}: holds values that are not finite" in refused("made/spoiled")
    assert not (tmp_path / "made").exists()
    (tmp_path / "there").mkdir()
    assert f"{expert}: holds values that are not finite" in refused("there")
    assert list((tmp_path / "there").iterdir()) == []
    change(expert, before)
    surplus = expert.replace("w2", "w4")
    change_in = data["weight_map"][expert]
    stored = load_file(tmp_path / "hf" / change_in)
    save_file({**stored, surplus: before}, tmp_path / "hf" / change_in)
    index.write_text(json.dumps({**data, "weight_map": {**data["weight_map"], surplus: change_in}}))
    assert f"{surplus}: " in refused()
    save_file(stored, tmp_path / "hf" / change_in)
    index.write_text(json.dumps(data))
    file = tmp_path / "hf" / data["weight_map"][expert]
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header[expert]["data_offsets"] = next(
        at["data_offsets"] for name, at in header.items() if name != expert
    )
    text = json.dumps(header).encode()
    for forged in (
        (1 << 60).to_bytes(8, "little") + whole[8:],
        len(text).to_bytes(8, "little") + text + whole[8 + size :],
    ):
        file.write_bytes(forged)
        assert f"{file}: is no safetensors file" in refused()
    file.write_bytes(whole)
    change(expert, before)
    moved = {**data, "weight_map": {**data["weight_map"], gate: data["weight_map"][expert]}}
    index.write_text(json.dumps(moved))
    assert f"{gate}: is in" in refused()
    index.write_text(
        json.dumps({**data, "weight_map": {**data["weight_map"], gate: "../x.safetensors"}})
    )
    assert "needs a weight_map from tensors to files beside it" in refused()
    index.write_text(json.dumps(data))
    assert not (tmp_path / "ours").exists()
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours"))) == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for source, out, message in (
        ("ours", "full", "exists and is not empty"),
        ("hf", "new", "holds no checkpoint of moewright"),
    ):
        assert (
            main(("convert", "export", str(tmp_path / source), "--out", str(tmp_path / out))) == 2
        )
        assert message in capsys.readouterr().err
    payload = next((tmp_path / "ours" / "step-00000000").glob("rank-*"))
    spoiled = bytearray(payload.read_bytes())
    spoiled[-1] ^= 1
    payload.write_bytes(spoiled)
    assert main(("convert", "export", str(tmp_path / "ours"), "--out", str(tmp_path / "new"))) == 2
    assert "its checksum does not hold" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


_NORM = "model.norm.weight"


def _rename(extra: dict[str, Any], key: str, old: str, new: str) -> None:
    extra["hf"][key][new] = extra["hf"][key].pop(old)


# What a forged checkpoint says of its files, and what the refusal says.
_FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a weight file above": (
        lambda extra: _rename(extra, "files", "model.safetensors", "../outside.safetensors"),
        "hf.files='../outside.safetensors': is not the plain name",
    ),
    "a hidden weight file": (
        lambda extra: _rename(extra, "files", "model.safetensors", "..safetensors"),
        "hf.files='..safetensors': is not the plain name",
    ),
    "a text above": (
        lambda extra: extra["hf"]["texts"].update({"../outside.json": "{}"}),
        "hf.texts='../outside.json': is not a file that an import keeps",
    ),
    "a text of another name": (
        lambda extra: extra["hf"]["texts"].update({"modeling.py": "print()"}),
        "hf.texts='modeling.py': is not a file",
    ),
    "texts that are a list": (
        lambda extra: extra["hf"].update(texts=["config.json"]),
        "hf.texts",
    ),
    "a text that is a number": (
        lambda extra: extra["hf"]["texts"].update({"config.json": 1}),
        "config.json",
    ),
    "no files": (lambda extra: extra["hf"].pop("files"), "hf.files: is missing"),
    "nothing": (lambda extra: extra.update(hf=[]), "hf=a list of 0: must be a table"),
    "an entry of one": (
        lambda extra: extra["hf"]["files"].update({"model.safetensors": [[_NORM]]}),
        "hf.files",
    ),
    "a dtype of another world": (
        lambda extra: extra["hf"]["files"]["model.safetensors"][0].__setitem__(1, "F7"),
        "is of F7; known are I64, F32, BF16, F16",
    ),
    "a tensor twice": (
        lambda extra: extra["hf"]["files"].update({"more.safetensors": [[_NORM, "BF16"]]}),
        f"hf.files.more.safetensors: names {_NORM} twice",
    ),
    "a tensor of another model": (
        lambda extra: extra["hf"]["files"]["model.safetensors"].append(["model.x", "BF16"]),
        "model.x: is not a tensor of this model",
    ),
    "a precision of another world": (
        lambda extra: (extra.pop("hf"), extra.update(train={"precision": "fp7"})),
        "train.precision=fp7: is not a precision",
    ),
    "a history that is a number": (
        lambda extra: (extra.pop("hf"), extra.update(train=7)),
        "train.precision=7: is not a precision",
    ),
    "a model of another width": (
        lambda extra: extra["model"].update(hidden_size=64),
        "has shape",
    ),
}


@pytest.mark.parametrize("forgery", _FORGERIES)
def test_a_forged_history_writes_nothing(
    forgery: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint comes from anybody; its own words choose no path, and are no traceback."""
    forge, message = _FORGERIES[forgery]
    write_model("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    home = tmp_path / "home"
    assert main(("convert", "import", str(tmp_path / "hf"), "--out", str(home / "ours"))) == 0
    path = home / "ours" / "step-00000000" / "index.json"
    body = json.loads(path.read_text())["body"]
    if _NORM not in str(body["extra"]["hf"]["files"]):
        raise AssertionError("the tensor that forgeries name is not there")
    forge(body["extra"])
    canonical = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "body": body}))
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(("convert", "export", str(home / "ours"), "--out", str(home / "new"))) == 2
    refusal = capsys.readouterr().err
    assert message in refusal
    assert refusal.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_that_writes_a_tensor_twice_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("qwen3", tmp_path / "hf")
    model = read_config(tmp_path / "hf")
    usual = dict(USUAL_LAYER_NAMES)
    for part, wrong, message in (
        (
            "attention.k.weight",
            whole("self_attn.v_proj.weight"),
            "self_attn.v_proj.weight.*would be read for two",
        ),
        ("mlp.gate_up.weight", whole("mlp.gate_proj.weight"), "gate_proj.weight.*has shape"),
        (
            "mlp.gate_up.weight",
            (NamePattern(names=("mlp.gate_proj.weight",) * 2),),
            "would be read for two tensors",
        ),
        (
            "mlp.down.weight",
            (NamePattern(names=("mlp.gate_proj.weight", "mlp.up_proj.weight")),),
            "would not be written exactly once",
        ),
    ):
        monkeypatch.setattr(candidates, "USUAL_LAYER_NAMES", usual | {part: wrong})
        with pytest.raises(BadInput, match=message):
            import_weights.plan_import(tmp_path / "hf", model, tmp_path / "ours")


# The peak of memory above the start, in bytes, of an import and of an export. It runs in a process
# of its own, whose memory holds nothing of other tests, and looks at anonymous memory alone: pages
# of files come and go as the kernel likes.
_PEAKS = """
import sys, threading
from pathlib import Path
from moewright.cli.main import main

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])

def measure_peaks(hf, folder):
    for verb, source, out in (("import", hf, "ours"), ("export", folder / "ours", "back")):
        before = anonymous_bytes()
        samples = [0]
        done = threading.Event()

        def sample():
            while not done.wait(0.001):
                samples.append(anonymous_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        assert main(("convert", verb, str(source), "--out", str(folder / out))) == 0
        done.set()
        sampler.join()
        yield max(samples) - before

folder = Path(sys.argv[1])
list(measure_peaks(folder / "hf", folder / "warm"))  # libraries, threads and pools are no weights
print(*measure_peaks(folder / "hf", folder))
"""


@pytest.mark.thorough
def test_memory_holds_about_one_file(tmp_path: Path) -> None:
    """Files of 17 MB, of bf16 weights, are imported and exported.

    They are large beside the megabyte or two that Python's own objects come and go by.
    """
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=24,
        num_attention_heads=8,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
        tmp_path / "hf", max_shard_size=17_200_000
    )
    shard = max(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")) > 10 * shard
    # With it, what is freed goes back to the system at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _PEAKS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    into, back = (int(peak) / shard for peak in run.stdout.splitlines()[-1].split())
    # A file as it is read and as it is written; on the way back tensors one by one.
    assert into < 2.2, into
    assert back < 1.5


def test_a_card_names_the_model_of_the_hub_that_a_run_started_from(tmp_path: Path) -> None:
    base = tmp_path / "hub/models--Org--Tiny-MoE/snapshots/0123abc"
    workload = replace(tiny_jobs.build_workload(DataSpec()), weights=str(base))
    plan = tiny_jobs.build_plan(workload, "", world_size=1)
    card = _write_card(plan, tmp_path / "run/checkpoints/step-00000002")
    assert "base_model: Org/Tiny-MoE\n" in card
    assert "# Org/Tiny-MoE, trained with moewright" in card
    assert "Started from: Org/Tiny-MoE, revision 0123abc." in card
    elsewhere = replace(plan, workload=replace(workload, weights="models/mine"))
    card = _write_card(elsewhere, tmp_path / "run/checkpoints/step-00000002")
    assert "base_model" not in card
    assert "Started from: models/mine." in card


def test_a_card_counts_the_sequences_of_a_batch_that_grew(tmp_path: Path) -> None:
    ramp = BatchRampSpec(ramp_start=2, ramp_increment=2, ramp_samples=12)
    workload = replace(tiny_jobs.build_workload(DataSpec()), seq_len=16, global_batch=8, ramp=ramp)
    plan = tiny_jobs.build_plan(workload, "", world_size=1)
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    # Stages of four samples in steps of 2, 4 and 6, the last of which ends beyond; then 8 a step.
    sequences = 2 + 2 + 4 + 6 + 8 + 8
    card = _write_card(plan, checkpoint)
    assert f"6 steps on {sequences} sequences of 16 tokens ({sequences * 16} in all)" in card
    counted = replace(plan, workload=replace(workload, batch_samples=5))
    assert "6 steps of 5 samples" in _write_card(counted, checkpoint)
