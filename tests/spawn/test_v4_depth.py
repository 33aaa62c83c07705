"""DeepSeek-V4's MTP depth: transformers has none, so a depth is stated here of its own layers.

What a depth does is read in deepseek-ai's inference/model.py (MTPBlock) and in vLLM's and SGLang's
models: every stream of the last hidden state, normed and projected, and to each the embedding of
the token ahead, normed and projected; a layer with a window; its own weights make one of the
streams for the model's head. Its layer is one of transformers' here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_families import save_gradients, write_model
from moewright.cli.main import main
from moewright.families.deepseek_v4 import DEEPSEEK_V4
from moewright.families.tiny import VOCABULARY
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

LAYERS = 4
DEPTH = f"layers.{LAYERS}."
FIELDS = DEEPSEEK_V4.tiny
ONE_MORE: dict[str, Any] = {
    "num_hidden_layers": LAYERS + 1,
    "layer_types": [*FIELDS["layer_types"], "sliding_attention"],
    "mlp_layer_types": [*FIELDS["mlp_layer_types"], "moe"],
}


class Depth(nn.Module):
    """The parts of a depth besides its layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, streams = config.hidden_size, config.hc_mult
        generator = torch.Generator().manual_seed(11)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * hidden**-0.5)

        self.enorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        for norm in (self.enorm, self.hnorm, self.norm):
            norm.weight = nn.Parameter(1 + draw(hidden).detach())
        self.e_proj = nn.Linear(hidden, hidden, bias=False)
        self.h_proj = nn.Linear(hidden, hidden, bias=False)
        self.e_proj.weight, self.h_proj.weight = draw(hidden, hidden), draw(hidden, hidden)
        self.hc_head_fn = draw(streams, streams * hidden)
        self.hc_head_base = draw(streams)
        self.hc_head_scale = draw(1)
        self._eps = config.rms_norm_eps, config.hc_eps

    def join(self, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Join [B,S,H] and [B,S,N,H]."""
        return self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(streams))

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        norm_eps, eps = self._eps
        flat = streams.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        weights = torch.sigmoid(flat @ self.hc_head_fn.T * self.hc_head_scale + self.hc_head_base)
        return self.norm(((weights + eps)[..., None] * streams).sum(2))


def write_published(folder: Path, depth: Depth) -> Path:
    """Write the model of `folder`, of a layer more, with that layer as the depth of the others."""
    out = folder.with_name("published")
    out.mkdir()
    stored = load_file(folder / "model.safetensors")
    tensors = {name.replace(f"model.{DEPTH}", "mtp.0."): value for name, value in stored.items()}
    tensors |= {f"mtp.0.{name}": value.detach() for name, value in depth.named_parameters()}
    assert len(tensors) > len(stored)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for field in ("layer_types", "mlp_layer_types"):
        config[field] = config[field][:LAYERS]
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json.dumps(config))
    return out


def sum_loss(logits: torch.Tensor, labels: torch.Tensor, ahead: int) -> torch.Tensor:
    targets = labels[:, ahead:]
    return nn.functional.cross_entropy(
        logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), reduction="sum"
    )


def compute_gradients(
    folder: Path, depth: Depth, ids: torch.Tensor, coefficient: float
) -> dict[str, torch.Tensor]:
    """Return the gradients of both losses, by the names in the published folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    last = model.model.layers[-1]
    noted: dict[str, Any] = {}
    # The token ahead of the last one is any: no target follows it.
    ahead = torch.cat((ids[:, 1:], ids[:, :1]), 1)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        noted["hidden"] = args[0]
        joined = depth.join(model.model.embed_tokens(ahead), args[0])
        return (joined, *args[1:]), kwargs | {"input_ids": ahead}

    def leave(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        noted["depth"] = result
        return noted["hidden"]

    last.register_forward_pre_hook(enter, with_kwargs=True)
    last.register_forward_hook(leave)
    logits = model(ids).logits
    depth_logits = model.lm_head(depth.collapse(noted["depth"]))
    total = sum_loss(logits, ids, 1) + coefficient * sum_loss(depth_logits, ids, 2)
    (total / ids[:, 1:].numel()).backward()
    gradients = save_gradients(model, folder.with_name("gradients"))
    named = {name.replace(f"model.{DEPTH}", "mtp.0."): grad for name, grad in gradients.items()}
    return named | {f"mtp.0.{name}": part.grad for name, part in depth.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ("mbs4", 1),
        ("tp2,ep2,mbs2", 2),
        thorough("pp2,mbs2,recompute=full", 2),
        thorough("ep2,zero3,mbs2", 2),
    ],
)
def test_the_depth_of_deepseek_v4_has_the_gradients_of_its_statement(
    layout: str, nproc: int, tmp_path: Path
) -> None:
    write_model("deepseek_v4", tmp_path / "hf", **ONE_MORE)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    depth = Depth(config)
    published = write_published(tmp_path / "hf", depth)
    ids = torch.randint(0, VOCABULARY, (1, 8, 16), generator=torch.Generator().manual_seed(3))
    batch = tmp_path / "batch.safetensors"
    save_file({"input_ids": ids, "labels": ids.clone()}, batch)
    expected = compute_gradients(tmp_path / "hf", depth, ids[0], 0.1)
    out = tmp_path / "out"
    options = ("--batch", str(batch), "--layout", layout, "--nproc", str(nproc), "--out", str(out))
    assert main(("verify", str(published), *options)) == 0
    actual = load_file(out / "tensors.safetensors")
    names = {name.removeprefix("grad/") for name in actual if name.startswith("grad/")}
    assert sum(name.startswith("mtp.0.") for name in names) > 40
    for name in names:
        gradient = expected[name]
        # One factor of a whole matrix has a gradient in which almost all cancels.
        scaled = expected[name.replace("head_scale", "head_fn").replace("hc_scale", "hc_fn")]
        scale = scaled.norm() if scaled.norm() else 1.0
        assert float((actual[f"grad/{name}"] - gradient).norm() / scale) < 3e-5, name
