"""`moewright dryrun` from a job file to a table, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from moewright.api.verifying import count_rank
from moewright.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TINY = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
vocab_size = 320
intermediate_size = 48
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 16
model_type = "qwen3_moe"
norm_topk_prob = true
rms_norm_eps = 1e-6
max_position_embeddings = 64
[layout]
text = "tp2,ep8"
[train]
nproc = 1024
hardware = "H800"
seq_len = 32
global_batch = 8192
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(TINY)
    return str(path)


def test_counted_stands_beside_predicted(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "counted.json"
    assert main(["dryrun", job, "--rank", "1023", "-v", "--json", str(out)]) == 0
    output = capsys.readouterr().out
    assert "rank 1023 of 1024" in output
    assert "2 of the step's 16 micro-batches" in output
    assert "reduce scatter / edp" in output
    assert "differs" not in output
    assert "At its peak the rank holds " in output
    assert "The planner expects " in output
    counted = json.loads(out.read_text())
    assert counted["ledger"]["rank"] == 1023
    assert counted["states_bytes"] == sum(
        row["bytes"]
        for row in counted["ledger"]["memory"]
        if row["component"] not in ("activations", "logits")
    )


def test_progress_goes_from_the_first_pass_to_the_last(job: str) -> None:
    shares: list[float] = []
    count_rank(Path(job), 5, ["layout.text=pp2,ep8"], shares.append)
    assert shares == [(place + 1) / len(shares) for place in range(len(shares))]
    assert len(shares) > 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "1024"), "--rank=1024: ranks are 0 to 1023; nearest legal value: 1023"),
        (("--rank", "-1"), "--rank=-1: ranks are 0 to 1023; nearest legal value: 0"),
        (("--rank", "0", "--set", "layout.text=tp3"), "job.toml: layout.tp=3: "),
        (("--rank", "0", "--set", "train.global_batch=100"), "job.toml: train.global_batch=100: "),
        (
            ("--rank", "0", "--set", "layout.text=graphs=attn,zero2"),
            "job.toml: layout.zero=2: the engine captures parts of layers whose work differs",
        ),
        ((), "--rank"),
    ],
)
def test_refusals_are_one_line(
    arguments: tuple[str, ...], message: str, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", job, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moewright: ")
    assert message in line


def test_the_recipe_at_scale_is_legal(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in (ROOT / "recipes").glob("*h800*.toml"):
        assert main(["estimate", str(recipe)]) == 0
        assert "verdict   fits" in capsys.readouterr().out


def test_a_plan_is_counted_as_it_stands(job, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["estimate", job, "--json", str(path)]) == 0
    capsys.readouterr()
    assert main(["dryrun", str(path), "--rank", "3"]) == 0
    assert "rank 3 of 1024" in capsys.readouterr().out
    assert main(["dryrun", str(path), "--rank", "3", "--set", "train.lr=1"]) == 2
    assert "a plan is counted as it stands" in capsys.readouterr().err


@pytest.mark.slow
def test_flops_are_those_that_torch_counts_of_transformers(tmp_path: Path) -> None:
    """Of the same model on the same batch, products of experts one by one; to the last one.

    torch counts all pairs of attention, a dry run those that a causal mask leaves.
    """
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    text = TINY.replace("tp2,ep8", "ep1").replace("1024", "1").replace("8192", "1")
    (tmp_path / "job.toml").write_text(text)
    out = tmp_path / "counted.json"
    assert main(["dryrun", str(tmp_path / "job.toml"), "--rank", "0", "--json", str(out)]) == 0
    counted = json.loads(out.read_text())["ledger"]["flops"]
    config = transformers.Qwen3MoeConfig(
        **tomllib.loads(text)["model"],
        decoder_sparse_step=1,
        mlp_only_layers=[],
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (1, 32))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    pairs = {"attention": 2}
    total = sum(row["flops"] * pairs.get(row["op"], 1) for row in counted)
    assert total == counter.get_total_flops()
