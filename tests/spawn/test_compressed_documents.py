"""Documents packed into sequences of DeepSeek-V4 are what transformers computes of each alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_indexer_objective import COEFFICIENT, add_block_objectives, run_verify
from test_verify import distance, token_loss

from hf_families import save_gradients, write_model
from moewright.engine.kernels.attention import build_segments
from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.run import early_checks, verify
from moewright.engine.run.early_checks import read_batch_workload
from moewright.families.tiny import VOCABULARY
from moewright.spec.workload import DataSpec, DocumentMasking, LossSpec
from selection import thorough

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.spawn

# Three, no and two blocks of 4 tokens; one, none and one of 8.
LENGTHS = (13, 3, 8)
TOKENS = sum(LENGTHS)
ROWS = 4


@pytest.fixture(params=[DocumentMasking.BOUNDED, DocumentMasking.RESTARTED])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` read rows of documents of these lengths, and train indexers."""

    def read_packed(*args: Any, **kwargs: Any) -> Any:
        return replace(read_batch_workload(*args, **kwargs), data=DataSpec(documents=request.param))

    def build_packed(runtime: Any, inputs: torch.Tensor, targets: torch.Tensor, _: None) -> Any:
        segments = build_segments(LENGTHS * len(inputs), runtime.device)
        return build_micro_batch(runtime, inputs, targets, segments)

    monkeypatch.setattr(verify, "read_batch_workload", read_packed)
    monkeypatch.setattr(verify, "build_micro_batch", build_packed)
    monkeypatch.setattr(early_checks, "LossSpec", lambda **_: LossSpec(indexer_coeff=COEFFICIENT))


def read_each_alone(
    folder: Path, ids: torch.Tensor, scratch: Path
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits and token losses of rows of documents, and the gradients of their mean loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    objectives: list[torch.Tensor] = []
    add_block_objectives(model, objectives)
    logits, losses = [], []
    for start, stop in pairwise(accumulate(LENGTHS, initial=0)):
        document = ids[:, start:stop]
        seen = len(objectives)
        logits.append(model(document).logits)
        losses.append(token_loss(logits[-1], document))
        objectives[seen:] = [term * (stop - start) / TOKENS for term in objectives[seen:]]
    nll = torch.cat(losses, 1)
    nll.mean().backward(retain_graph=True)
    indexers = [weight for name, weight in model.named_parameters() if ".indexer." in name]
    torch.autograd.backward(COEFFICIENT * sum(objectives), inputs=indexers)
    return torch.cat(logits, 1).detach(), nll.detach(), save_gradients(model, scratch)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ("mbs4", 1),
        thorough("tp2,ep2,mbs2", 2),
        ("cp2,cp_comm=a2a,ep2,mbs2", 2),
        thorough("pp2,mbs2,recompute=core_attn", 2),
        thorough("ep2,zero3,recompute=full", 2),
    ],
)
def test_packed_documents_equal_transformers_on_each_alone(
    layout: str, nproc: int, tmp_path: Path
) -> None:
    write_model("deepseek_v4", tmp_path / "hf")
    ids = torch.randint(
        0, VOCABULARY, (1, ROWS, TOKENS), generator=torch.Generator().manual_seed(3)
    )
    labels = ids.clone()
    firsts = list(accumulate(LENGTHS, initial=0))[:-1]
    labels[..., firsts] = -100  # what follows a document is of another one
    batch = tmp_path / "batch.safetensors"
    save_file({"input_ids": ids, "labels": labels}, batch)
    outputs = run_verify(tmp_path / "hf", batch, tmp_path / "out", layout, nproc)
    logits, nll, gradients = read_each_alone(tmp_path / "hf", ids[0], tmp_path / "gradients")
    torch.testing.assert_close(outputs["logits"], logits, rtol=1e-4, atol=2e-5)
    has_target = labels[0, :, 1:] >= 0
    own = outputs["nll"][has_target].view(ROWS, -1)
    torch.testing.assert_close(own, nll, rtol=1e-4, atol=2e-5)
    names = {name for name in outputs if name.startswith("grad/")}
    assert any(".indexer." in name for name in names)
    # As of one process and transformers, and of a layout and one process (test_verify).
    bound = 1e-5 if nproc == 1 else 4e-5
    for name in names:
        assert distance(outputs[name], gradients[name.removeprefix("grad/")]) < bound, name
