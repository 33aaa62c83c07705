"""Answers of a model in one process, token by token, for a look at what it has learnt.

Every token is a forward pass over the whole text, without a cache: meant for small models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.run.corpus_loader import NoBatches
from moewright.engine.run.verify import load_hf_state
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, Workload

_LENGTH_MULTIPLE = 16


@torch.no_grad()
def generate_greedily(
    model: ModelSpec,
    weights: Path,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    stops: Collection[int] = (),
) -> list[int]:
    """Return the likeliest next tokens of a prompt, one after the other, in fp32 on the CPU.

    It ends after `new_tokens`, or with a token of `stops`, which is left out.

    Raises:
        BadInput: when the folder of `weights` is not of the model.
    """
    length = len(prompt) + new_tokens
    seq_len = -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    workload = Workload(seq_len=seq_len, global_batch=1, precision=Dtype.FP32)
    job = Job(model=model, workload=workload, layout=Layout(world_size=1))
    state = load_hf_state(job, weights, NoBatches(), rank=0, device=torch.device("cpu"))
    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    ids[0, : len(prompt)] = torch.tensor(prompt)
    no_targets = torch.full_like(ids, -1)
    answer: list[int] = []
    for position in range(len(prompt), length):
        batch = build_micro_batch(state.runtime, ids, no_targets, None)
        logits_TV = state.model(batch, needs_logits=True).logits
        token = int(logits_TV[position - 1, : model.vocab_size].argmax())
        if token in stops:
            break
        answer.append(token)
        ids[0, position] = token
    return answer
