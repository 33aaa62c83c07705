"""Write what the router of a trained small model does, for the course's pictures.

moewright data build --out runs/quickstart_data
moewright bench machine --nproc 2 --out runs/machine.toml
moewright train recipes/quickstart_2cpu_bf16.toml --out runs/route
moewright convert export runs/route --out runs/route_hf
python -m docs.tools.router_probabilities runs/route_hf runs/quickstart_data
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "src/moewright/view/course/tiny_router.json"
SENTENCE = "The value is not in the list of numbers."
SEQUENCES = 16
SEQ_LEN = 256
STEPS = 240  # of the recipe
DECIMALS = 4


def main(folder: Path, data: Path) -> None:
    """Run the model on a sentence and on held-out text, and write the file."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encoded = tokenizer.encode(SENTENCE, add_special_tokens=False)
    heldout = np.fromfile(data / "heldout.bin", dtype=np.uint16)[: SEQUENCES * SEQ_LEN]
    top_k = model.config.num_experts_per_tok

    def route(ids: list[list[int]]) -> list[Any]:
        with torch.no_grad():
            output = model(torch.tensor(ids), output_router_logits=True)
        return [logits.softmax(-1) for logits in output.router_logits]

    probabilities = route([encoded.ids])
    rows = [
        np.bincount(layer.topk(top_k).indices.flatten().numpy(), minlength=layer.shape[-1])
        for layer in route(heldout.reshape(SEQUENCES, SEQ_LEN).astype(int).tolist())
    ]
    content = {
        "top_k": top_k,
        "steps": STEPS,
        "words": [tokenizer.decode([token]).strip() for token in encoded.ids],
        "probabilities": [
            [[round(value, DECIMALS) for value in row] for row in layer.tolist()]
            for layer in probabilities
        ],
        "token_count": SEQUENCES * SEQ_LEN,
        "counts": [layer.tolist() for layer in rows],
    }
    PAGE.write_text(json.dumps(content) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
