"""Checkpoints of Megatron-LM: in and out bit for bit, and nothing of their pickles is executed."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from hf_families import write_model
from moewright.cli.main import main
from moewright.engine.checkpoint import find_checkpoint
from moewright.engine.torch_dist.export_weights import plan_megatron_export
from moewright.engine.torch_dist.metadata import METADATA_FILE, TorchDistReader
from moewright.spec.errors import BadInput

PEER = Path(__file__).parents[1] / "megatron_core_peer.py"
LAYERS = 2


def write_hf(folder: Path, *, own_layers: bool) -> dict[str, torch.Tensor]:
    """Write a Qwen3-MoE whose layers are all alike, or not, and return its weights."""
    more = {} if own_layers else {"mlp_only_layers": []}
    write_model("qwen3_moe", folder)
    if more:
        # The family's writer makes the second layer dense; here both have experts.
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        experts = {
            name.replace("layers.0.", "layers.1."): 0.5 * tensor
            for name, tensor in weights.items()
            if name.startswith("model.layers.0.mlp.")
        }
        kept = {name: t for name, t in weights.items() if ".layers.1.mlp." not in name}
        head = {"lm_head.weight": 0.25 * weights["model.embed_tokens.weight"]}
        config |= more | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({**kept, **experts, **head}, folder / "model.safetensors", {"format": "pt"})
    return load_file(folder / "model.safetensors")


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.mark.parametrize("own_layers", [False, True])
def test_a_model_goes_to_megatron_and_back_bit_for_bit(own_layers: bool, tmp_path: Path) -> None:
    weights = write_hf(tmp_path / "hf", own_layers=own_layers)
    assert run("import", tmp_path / "hf", "--out", tmp_path / "ours") == 0
    to = ("--to", "megatron", "--dtype", "fp32", "--out", tmp_path / "megatron")
    assert run("export", tmp_path / "ours", *to) == 0
    config = ("--config", tmp_path / "hf", "--out", tmp_path / "back")
    assert run("import", tmp_path / "megatron", *config) == 0
    assert run("export", tmp_path / "back", "--dtype", "fp32", "--out", tmp_path / "hf2") == 0
    again = load_file(tmp_path / "hf2" / "model.safetensors")
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("family", "layer", "names"),
    [
        (
            "gpt_oss",
            "decoder.layers.",
            (
                *("self_attention.core_attention.softmax_offset", "self_attention.linear_qkv.bias"),
                *("self_attention.linear_proj.bias", "mlp.router.bias"),
                *("mlp.experts.experts.linear_fc1.bias", "mlp.experts.experts.linear_fc2.bias"),
            ),
        ),
        # Latent attention whose queries are not compressed: they are no part of a merged tensor.
        ("deepseek_v2", "decoder.layers.0.", ("self_attention.linear_q_proj.weight",)),
    ],
)
def test_biases_sinks_and_queries_of_latent_attention_have_their_names(
    family: str, layer: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    write_model(family, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert run("import", tmp_path / "hf", "--out", tmp_path / "ours") == 0
    to = ("--to", "megatron", "--dtype", "fp32", "--out", tmp_path / "mg")
    assert run("export", tmp_path / "ours", *to) == 0
    stored = TorchDistReader(tmp_path / "mg" / "iter_0000000").tensors
    assert {layer + name for name in names} <= set(stored)
    config = ("--config", tmp_path / "hf", "--out", tmp_path / "back")
    assert run("import", tmp_path / "mg", *config) == 0
    assert run("export", tmp_path / "back", "--dtype", "fp32", "--out", tmp_path / "hf2") == 0
    again = load_file(tmp_path / "hf2" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_what_sees_is_told_of_when_the_language_model_goes_alone(tmp_path: Path, capsys) -> None:
    write_model("qwen3_vl_moe", tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    count = sum(name.startswith("model.visual.") for name in stored)
    assert run("import", tmp_path / "hf", "--out", tmp_path / "ours") == 0
    capsys.readouterr()
    to = ("--to", "megatron", "--out", tmp_path / "megatron")
    assert run("export", tmp_path / "ours", *to) == 0
    assert f"left out: {count} tensors of model.visual; the language" in capsys.readouterr().out
    # A run keeps the language model alone, and names the folder that it started from.
    write_hf(tmp_path / "text", own_layers=False)
    assert run("import", tmp_path / "text", "--out", tmp_path / "run") == 0
    checkpoint = find_checkpoint(tmp_path / "run")
    assert not plan_megatron_export(checkpoint, None).left_out
    started = plan_megatron_export(checkpoint, None, base=tmp_path / "hf")
    assert started.left_out == {"model.visual": count}


def build_megatron_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Megatron-LM, each layer's and each expert's by itself.

    It is written from the format's description, beside the code that it tests.
    """
    tensors = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, own = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (weights[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
        groups = []
        for group in range(2):  # of two query heads of 16 each
            groups += [q[32 * group :][:32], k[16 * group :][:16], v[16 * group :][:16]]
        tensors |= {
            f"{own}self_attention.linear_qkv.weight": torch.cat(groups),
            f"{own}self_attention.linear_qkv.layer_norm_weight": weights[
                f"{theirs}input_layernorm.weight"
            ],
            f"{own}self_attention.q_layernorm.weight": weights[f"{theirs}self_attn.q_norm.weight"],
            f"{own}self_attention.k_layernorm.weight": weights[f"{theirs}self_attn.k_norm.weight"],
            f"{own}self_attention.linear_proj.weight": weights[f"{theirs}self_attn.o_proj.weight"],
            f"{own}pre_mlp_layernorm.weight": weights[f"{theirs}post_attention_layernorm.weight"],
            f"{own}mlp.router.weight": weights[f"{theirs}mlp.gate.weight"],
        }
        for expert in range(8):
            path = f"{own}mlp.experts.experts.{expert}."
            part = f"{theirs}mlp.experts.{expert}."
            tensors |= {
                f"{path}linear_fc1.weight_w": weights[f"{part}gate_proj.weight"],
                f"{path}linear_fc1.weight_v": weights[f"{part}up_proj.weight"],
                f"{path}linear_fc2.weight": weights[f"{part}down_proj.weight"],
            }
    return tensors


def write_megatron(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    state = tensors | {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    state |= {"rng_state": torch.zeros(2)}
    save(state, checkpoint_id=str(folder), no_dist=True)


def test_experts_in_tensors_of_their_own_are_read(tmp_path: Path) -> None:
    weights = write_hf(tmp_path / "hf", own_layers=False)
    write_megatron(tmp_path / "mg" / "iter_0000007", build_megatron_tensors(weights))
    (tmp_path / "mg" / "latest_checkpointed_iteration.txt").write_text("7")
    config = ("--config", tmp_path / "hf", "--out", tmp_path / "ours")
    assert run("import", tmp_path / "mg", *config) == 0
    assert run("export", tmp_path / "ours", "--dtype", "fp32", "--out", tmp_path / "hf2") == 0
    again = load_file(tmp_path / "hf2" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_what_does_not_fit_the_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_hf(tmp_path / "hf", own_layers=False)
    tensors = build_megatron_tensors(weights)
    router = "decoder.layers.1.mlp.router.weight"
    cases = {
        "unknown": (tensors | {"decoder.layers.0.adapter.weight": torch.ones(2)}, "adapter.weight"),
        "missing": ({k: v for k, v in tensors.items() if k != router}, router),
        "shape": (tensors | {router: torch.ones(8, 31)}, router),
    }
    for name, (state, message) in cases.items():
        write_megatron(tmp_path / name, state)
        config = ("--config", tmp_path / "hf", "--out", tmp_path / "ours")
        assert run("import", tmp_path / name, *config) == 2
        assert message in capsys.readouterr().err
    assert run("import", tmp_path / "unknown", "--out", tmp_path / "ours") == 2
    assert "--config: is needed" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


class Executed:
    """A record whose unpickling would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.path), "w"))


def test_a_pickle_that_asks_for_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    stream = io.BytesIO()
    pickle.dump(Executed(tmp_path / "made"), stream)
    (tmp_path / METADATA_FILE).write_bytes(stream.getvalue())
    with pytest.raises(BadInput, match=r"asks for (_?io)\.open, which no checkpoint needs"):
        TorchDistReader(tmp_path)
    assert not (tmp_path / "made").exists()


def test_damaged_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "mg"
    write_megatron(folder, {"a": torch.arange(12.0).reshape(3, 4)})
    reader = TorchDistReader(folder)
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(reader.read_box("a", (1, 1), (2, 3)), whole[1:, 1:])
    payload = next(folder.glob("*.distcp"))
    content = payload.read_bytes()
    payload.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match="ends beyond the end"):
        TorchDistReader(folder)
    payload.write_bytes(bytes(len(content)))
    with pytest.raises(BadInput, match="is damaged"):
        TorchDistReader(folder).read_box("a", (0, 0), (3, 4))
    metadata = (folder / METADATA_FILE).read_bytes()
    for cut in range(0, len(metadata), 37):
        (folder / METADATA_FILE).write_bytes(metadata[:cut])
        with pytest.raises(BadInput):
            TorchDistReader(folder)


def test_chunks_that_overlap_and_leave_a_hole_of_the_same_size_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mg"
    write_megatron(folder, {"a": torch.arange(4.0)})
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    stored = metadata.state_dict_metadata["a"]
    index = next(index for index in metadata.storage_data if index.fqn == "a")
    ends = (0, 1)
    stored.chunks = [
        replace(stored.chunks[0], offsets=torch.Size([first]), sizes=torch.Size([2]))
        for first in ends
    ]
    metadata.storage_data |= {
        replace(index, offset=torch.Size([first])): metadata.storage_data[index] for first in ends
    }
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match=r"a: boxes at \[0\] and \[1\] overlap"):
        TorchDistReader(folder)


def test_flattened_boxes_of_older_releases_are_read_in_their_shape(tmp_path: Path) -> None:
    """A [4, 6] tensor that TP cut in rows and columns, each box flattened and cut once more."""
    whole = torch.arange(24.0).reshape(4, 6)
    boxes = [[whole[r : r + 2, c : c + 3].flatten() for c in (0, 3)] for r in (0, 2)]
    stored = torch.stack([torch.stack(row) for row in boxes])
    save({"optimizer.state.exp_avg.a": stored}, checkpoint_id=str(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / METADATA_FILE).read_bytes())
    shape = {"nd_reformulated_orig_global_shape": (4, 6)}
    metadata.mcore_data = {"optimizer.state.exp_avg.a": shape}
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    reader = TorchDistReader(tmp_path)
    (name,) = reader.tensors
    assert reader.tensors[name].shape == (4, 6)
    assert torch.equal(reader.read_box(name, (0, 0), (4, 6)), whole)
    assert torch.equal(reader.read_box(name, (1, 2), (2, 3)), whole[1:3, 2:5])
    metadata.mcore_data[next(iter(metadata.mcore_data))] = {
        "nd_reformulated_orig_global_shape": (5, 6)
    }
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match=r"are no boxes of \[5, 6\]"):
        TorchDistReader(tmp_path)


@pytest.mark.thorough
@pytest.mark.spawn
@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("singleton", [0, 1])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_megatron_core_loads_what_is_written_and_what_it_writes_is_read(
    degrees: tuple[int, int, int], singleton: int, family: str, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core", reason="pip install megatron-core")
    if family == "qwen3_moe":
        weights = write_hf(tmp_path / "hf", own_layers=False)
    else:
        write_model(family, tmp_path / "hf")
        weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert run("import", tmp_path / "hf", "--out", tmp_path / "ours") == 0
    to = ("--to", "megatron", "--dtype", "fp32", "--out", tmp_path / "mg")
    assert run("export", tmp_path / "ours", *to) == 0
    tp, pp, ep = degrees
    nproc = max(tp, ep) * pp
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", str(PEER), str(tmp_path / "hf")]
    command += [str(tmp_path / "mg" / "iter_0000000"), str(tmp_path / "again")]
    log = tmp_path / "peer.log"
    with log.open("wb") as stream:
        done = subprocess.run(
            [*command, *map(str, (tp, pp, ep, singleton))],
            stdout=stream,
            stderr=stream,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    if nproc == 1 and family == "qwen3_moe":
        assert "logits differ by" in log.read_text()
    config = ("--config", tmp_path / "hf", "--out", tmp_path / "back")
    assert run("import", tmp_path / "again", *config) == 0
    assert run("export", tmp_path / "back", "--dtype", "fp32", "--out", tmp_path / "hf2") == 0
    again = load_file(tmp_path / "hf2" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
