"""A key of a config.json that changes the model is refused alike by every verb that reads one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from moewright.cli.main import main
from moewright.families.fields import FieldReader
from moewright.families.table import FAMILIES, nested_families
from moewright.intake import hf
from moewright.intake.unknown_fields import is_telling, skips_silently
from moewright.spec.errors import BadInput

MODELS = resources.files("moewright.intake").joinpath("data/models.json")
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# Keys of other families, with values that ask for other mathematics than Qwen3-MoE's.
TELLING: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "kv_lora_rank": 512,
    "swiglu_limit": 7.0,
    "partial_rotary_factor": 0.5,
    "clip_qkv": 8.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "scale_emb": 12,
    "hidden_act": "gelu",
    "moe_router_use_sigmoid": True,
}


def refuse_everywhere(key: str, value: object, folder: Path, capsys: Any) -> list[str]:
    """Return the refusal of a config with the key, as each verb prints it."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN | {key: value}))
    job = folder / "job.toml"
    job.write_text(
        f'[model]\nconfig = "{model}"\n[train]\nsteps = 1\nseq_len = 32\nglobal_batch = 8\n'
    )
    commands = (
        ("estimate", str(model), "--on", "8xH100", "--layout", "ep8"),
        ("plan", str(model), "--on", "8xH100"),
        ("convert", "import", str(model), "--out", str(folder / "weights")),
        ("verify", str(model), "--batch", "batch.safetensors", "--layout", "ep2", "--nproc", "2"),
        ("train", str(job), "--out", str(folder / "run")),
    )
    lines = []
    for command in commands:
        options = ("--out", str(folder / "verified")) if command[0] == "verify" else ()
        assert main((*command, *options)) == 2, command
        lines.append(capsys.readouterr().err)
    assert sorted(path.name for path in folder.iterdir()) == ["job.toml", "model"]
    return lines


@pytest.mark.parametrize("key", TELLING)
def test_a_telling_key_is_refused_alike_by_every_verb(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = refuse_everywhere(key, TELLING[key], tmp_path, capsys)
    assert len(set(lines)) == 1, lines
    assert f"{key}=" in lines[0]
    assert lines[0].count("\n") == 1


def test_the_scorer_of_the_family_may_be_stated() -> None:
    stated = hf.parse_config(QWEN | {"scoring_func": "softmax"}, where="", name="m")
    assert stated == hf.parse_config(QWEN, where="", name="m")
    with pytest.raises(
        BadInput, match=r"scoring_func=\"sigmoid\": .*nearest legal value: \"softmax\""
    ):
        hf.parse_config(QWEN | {"scoring_func": "sigmoid"}, where="c", name="m")


class NotedReads(FieldReader):
    """A reader that notes the names which change a model, not those that it only ignores."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data, "c")
        self.names: set[str] = set()

    def _read(self, names: Sequence[str]) -> tuple[str, Any]:
        self.names.update(names)
        return super()._read(names)


def test_no_key_that_some_family_reads_is_skipped_by_another() -> None:
    """A key that changes one family's model is telling in every other, or said to be harmless."""
    names: set[str] = set()
    for entry in json.loads(MODELS.read_text()).values():
        config = entry["config"]
        family = nested_families().get(config["model_type"])
        fields = NotedReads(config["text_config"] if family else config)
        (family or FAMILIES[config["model_type"]]).read_model(fields, "m")
        names |= fields.names
    assert len(names) > 100
    skipped = {name for name in names if not is_telling(name) and not skips_silently(name)}
    # Sizes that every family reads under some name, and switches, which are refused when on.
    plain = re.compile(r"n_|num_|max_|model_max|use_|mtp_|.*_bias$|.*nope$|chunk_size$")
    plain_switches = {"multi_gate", "residual_in_fp32", "route_norm", "tie_word_embeddings"}
    everywhere = {"initializer_range", "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"}
    left = skipped - everywhere - plain_switches - set(QWEN)
    assert sorted(name for name in left if not plain.match(name)) == []
