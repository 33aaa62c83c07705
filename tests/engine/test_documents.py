"""Documents packed into sequences compute what each of them computes alone, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model_oracle import single_process_model

from layout_space import SHAPES
from moewright.engine.data.indexed import open_indexed, write_indexed
from moewright.engine.data.sampler import attended_share, document_ends
from moewright.engine.kernels.attention import Segments
from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.model.transformer import Transformer
from moewright.spec.ledger import FlopOp
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec, RopeSpec
from moewright.spec.workload import DataSpec, DocumentMasking
from tiny_jobs import MODEL, build_workload

LENGTHS = ((5, 1, 20, 6), (32,), (3, 29))
LATENT = AttentionSpec(
    kind=AttentionKind.MLA, heads=4, kv_heads=4, head_dim=16, v_head_dim=12,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    rope=RopeSpec(interleaved=True),
)  # fmt: skip


# Blocks of 4 and of 8 tokens, of which no document but the longest has whole ones alone.
COMPRESSED = replace(SHAPES["compressed"], vocab_size=MODEL.vocab_size)


def build_segments(*lengths: int) -> Segments:
    return Segments(
        lengths=lengths, cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    )


def gradients(
    model: Transformer, ids: torch.Tensor, targets: torch.Tensor, segments: Segments | None
) -> list[torch.Tensor]:
    """Return the loss of every token that has a target, in order, and every gradient of the sum."""
    model.zero_grad()
    nll = model(build_micro_batch(model._runtime, ids, targets, segments)).nll
    nll.sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [nll.detach()[targets.flatten() >= 0], *(grad.clone() for grad in grads)]


@pytest.mark.parametrize("documents", [DocumentMasking.BOUNDED, DocumentMasking.RESTARTED])
@pytest.mark.parametrize(
    "spec", [MODEL, replace(MODEL, attention=LATENT), COMPRESSED], ids=["plain", "latent", "blocks"]
)
def test_packed_documents_equal_each_alone(documents: DocumentMasking, spec: ModelSpec) -> None:
    """Alone, each document is first in a row of its own; after it come tokens without a target."""
    model = single_process_model(spec, build_workload(DataSpec(documents=documents)))
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, MODEL.vocab_size, (len(LENGTHS), 33), generator=generator)
    inputs = ids[:, :-1]
    targets = ids[:, 1:].clone()
    alone = []
    alone_targets = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            targets[row, start + length - 1] = -1  # the next token is of another document
            alone.append(torch.randint(0, MODEL.vocab_size, (32,), generator=generator))
            alone[-1][:length] = inputs[row, start : start + length]
            alone_targets.append(torch.full((32,), -1))
            alone_targets[-1][:length] = targets[row, start : start + length]
            start += length
    packed = gradients(
        model, inputs, targets, build_segments(*(n for lengths in LENGTHS for n in lengths))
    )
    expected = gradients(model, torch.stack(alone), torch.stack(alone_targets), None)
    for result, reference in zip(packed, expected, strict=True):
        assert float((result - reference).norm()) <= 2e-5 * float(reference.norm())
    joined_losses = gradients(model, inputs, targets, None)[0]
    losses = expected[0]
    assert float((joined_losses - losses).norm() / losses.norm()) > 1e-2  # the test can fail


def test_attention_works_inside_documents_alone() -> None:
    model = single_process_model(MODEL, build_workload(DataSpec(documents=DocumentMasking.BOUNDED)))
    counters = model._runtime.counters
    ids = torch.zeros(2, 32, dtype=torch.int64)
    counted = []
    for segments in (build_segments(8, 24, 16, 16), None):
        with counters.counting():
            model(build_micro_batch(model._runtime, ids, ids, segments)).nll.sum().backward()
        counted.append(
            sum(flops for (op, _), flops in counters.flops.items() if op is FlopOp.ATTENTION)
        )
    assert counted[0] * (32 * 32 * 2) == counted[1] * (8 * 8 + 24 * 24 + 2 * 16 * 16)


def test_where_documents_end(tmp_path: Path) -> None:
    """Documents have 3, 0, 4, 1 and 6 tokens, samples 5.

    These are 0-4 and 5-9, of which the last target is token 10.
    """
    documents = [np.arange(length, dtype=np.uint16) for length in (3, 0, 4, 1, 6)]
    write_indexed(tmp_path / "d", documents, dtype=np.dtype("<u2"))
    data = open_indexed(tmp_path / "d")
    assert document_ends(data, 0, seq_len=5) == (3,)
    assert document_ends(data, 1, seq_len=5) == (2, 3)
    assert document_ends(data, 0, seq_len=7) == (
        3,
        7,
    )  # the target after the last token is of another document
    assert document_ends(data, 1, seq_len=7) == (1,)


def test_the_share_of_attention_that_documents_leave(tmp_path: Path) -> None:
    """Documents have 3, 0, 4, 1 and 6 tokens, the last of which is a target alone.

    The share is the sum of squared pieces by sample.
    """
    documents = [np.arange(length, dtype=np.uint16) for length in (3, 0, 4, 1, 6)]
    write_indexed(tmp_path / "d", documents, dtype=np.dtype("<u2"))
    data = open_indexed(tmp_path / "d")
    assert attended_share(data, seq_len=5) == (9 + 4 + 4 + 1 + 4) / 50
    assert attended_share(data, seq_len=13) == (9 + 16 + 1 + 25) / 169
    assert attended_share(data, seq_len=20) == 1.0  # no sample at all
