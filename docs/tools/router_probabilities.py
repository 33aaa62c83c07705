"""Write what the routers of trained small models do, for the course's pictures.

One model is trained as the recipe says, and followed with a sentence. Three more are trained for
fewer steps: with the recipe's balance loss, with nothing, and with a selection bias in a router of
sigmoids, as DeepSeek-V3 and MiniMax-M2 have it.

moewright data build --out runs/quickstart_data
moewright bench machine --nproc 2 --out runs/machine.toml
JOB=recipes/quickstart_2cpu_bf16.toml
moewright train $JOB --out runs/route
moewright train $JOB --set train.steps=60 --out runs/loss
SHORT="--set train.steps=60 --set train.aux_coeff=0"
BIASED="--set model.config=../docs/tools/biased_router.json --set train.bias_update_rate=0.01"
moewright train $JOB $SHORT --out runs/none
moewright train $JOB $SHORT $BIASED --out runs/bias
for run in route loss none bias; do moewright convert export runs/$run --out runs/hf/$run; done
python -m docs.tools.router_probabilities runs/hf runs/quickstart_data
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "src/moewright/view/course/tiny_router.json"
SENTENCE = "The value is not in the list of numbers."
SEQUENCES = 16
SEQ_LEN = 256
STEPS = 240  # of the recipe
BALANCE_STEPS = 60
DECIMALS = 4


def main(folder: Path, data: Path) -> None:
    """Run the models on a sentence and on held-out text, and write the file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    encoded = tokenizer.encode(SENTENCE, add_special_tokens=False)
    text = np.fromfile(data / "heldout.bin", dtype=np.uint16)[: SEQUENCES * SEQ_LEN]
    ids = text.reshape(SEQUENCES, SEQ_LEN).astype(int).tolist()
    router = route(folder / "route", [encoded.ids])
    content = {
        "top_k": router.top_k,
        "steps": STEPS,
        "words": [tokenizer.decode([token]).strip() for token in encoded.ids],
        "probabilities": [layer.round(DECIMALS).tolist() for layer in router.probabilities],
        "balance_steps": BALANCE_STEPS,
        "token_count": SEQUENCES * SEQ_LEN,
        "counts": {
            balance: count_rows(route(folder / balance, ids))
            for balance in ("none", "bias", "loss")
        },
    }
    PAGE.write_text(json.dumps(content) + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Probabilities [tokens][experts] of each layer, and what the choice adds to them."""

    top_k: int
    probabilities: list[Any]
    biases: list[Any]


def route(folder: Path, ids: list[list[int]]) -> Routing:
    """Return what the routers of an exported model make of sequences of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = model.state_dict()
    biases = [weights[name].numpy() for name in weights if name.endswith("correction_bias")]
    with torch.no_grad():
        layers = model(torch.tensor(ids), output_router_logits=True).router_logits
    return Routing(
        top_k=model.config.num_experts_per_tok,
        probabilities=[
            (logits.sigmoid() if biases else logits.softmax(-1)).double().numpy()
            for logits in layers
        ],
        biases=biases or [0.0] * len(layers),
    )


def count_rows(routing: Routing) -> list[list[int]]:
    """Return the rows of each expert in each layer."""
    layers = []
    for probabilities, bias in zip(routing.probabilities, routing.biases, strict=True):
        chosen = np.argsort(-(probabilities + bias), axis=-1)[:, : routing.top_k]
        layers.append(np.bincount(chosen.flatten(), minlength=probabilities.shape[-1]).tolist())
    return layers


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
