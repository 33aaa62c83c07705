"""A Hugging Face folder with fresh weights and a tokenizer of its own, to begin from nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from moewright.codec import write_text
from moewright.engine.data.chat_template import TEMPLATE_FILE
from moewright.engine.data.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    train_bpe,
)
from moewright.engine.hf.folder import SINGLE_FILE
from moewright.engine.hf.names import family_name_table, join_hf_tensors, to_hf_tensors
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.corpus_loader import NoBatches
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, Workload

TURN_MARKS = ("<|im_start|>", "<|im_end|>")


def write_fresh_model(
    out: Path, model: ModelSpec, *, config: str, template: str, texts: Iterable[str]
) -> None:
    """Write `model` with fresh weights in fp32, its config.json, and a chat tokenizer in `out`.

    The tokenizer learns its merges from `texts`, and has as many ids as the model.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe(texts, vocab_size=model.vocab_size - len(TURN_MARKS))
    tokenizer.inner.add_special_tokens(list(TURN_MARKS))
    tokenizer.save(out / TOKENIZER_FILE)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_MARKS[1],
        "pad_token": END_OF_DOCUMENT,
    }
    write_text(out / TOKENIZER_CONFIG_FILE, json.dumps(tokenizer_config, indent=2) + "\n")
    write_text(out / TEMPLATE_FILE, template)
    write_text(out / "config.json", config)
    workload = Workload(seq_len=model.max_position, global_batch=1, precision=Dtype.FP32)
    state = build_train_state(
        Job(model=model, workload=workload, layout=Layout(world_size=1)),
        NoBatches(),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_initial_value,
    )
    table = family_name_table(model)
    tensors = join_hf_tensors(
        part
        for shard in state.weight_shards()
        for part in to_hf_tensors(shard.tensor, table[shard.name])
    )
    save_file(tensors, str(out / SINGLE_FILE), metadata={"format": "pt"})
