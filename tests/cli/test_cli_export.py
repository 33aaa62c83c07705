"""`export` and `--from-flags` from the command line: what is printed, and how mistakes end."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import moewright as mw
from moewright.api.advising import write_megatron_changes
from moewright.api.launch_scripts import find_better_layouts
from moewright.cli.main import main

SCRIPT = """
torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 48 --hidden-size 2048 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 \\
  --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear \\
  --untie-embeddings-and-output-weights --bf16 --position-embedding-type rope \\
  --rotary-base 1000000 --max-position-embeddings 40960 --seq-length 4096 \\
  --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --lr 1e-4 \\
  --moe-token-dispatcher-type alltoall --expert-model-parallel-size ${EP:-8} \\
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size ${GBS:-64} \\
  --train-iters 20 $MORE
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3_30b_16h100.sh"


@pytest.fixture(scope="module", autouse=True)
def _one_search_of_a_plan():
    """Search what is better than a plan once: most tests here read the same script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "moewright.api.launch_scripts.find_better_layouts", cache(find_better_layouts)
        )
        yield


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    return path


@pytest.mark.thorough
def test_a_script_is_estimated_beside_what_would_be_better(script, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["estimate", "--from-flags", str(script), "--on", "H200", "--json", str(plan)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "model Qwen/Qwen3-30B-A3B, by its sizes",
        "verdict",
        "a step: ",
        "What would be better",
        "  1. ",
        "a step by estimate",
        "speed ",
        "write: ",
    ):
        assert text in shown
    assert "What went into it" not in shown
    assert (
        shown.index("verdict") < shown.index("What would be better") < shown.index("by its sizes")
    )
    written = json.loads(plan.read_text())
    assert written["layout"]["ep"] == written["layout"]["world_size"] == 8
    assert main(["export", str(plan), "--to", "megatron"]) == 0
    exported = capsys.readouterr().out
    assert "--expert-model-parallel-size 8" in exported
    again = tmp_path / "again.sh"
    again.write_text(exported)
    plan_again = tmp_path / "again.json"
    arguments = ["--from-flags", str(again), "--on", "8xH200", "--json", str(plan_again)]
    assert main(["export", *arguments]) == 0
    assert json.loads(plan_again.read_text())["fingerprint"] == written["fingerprint"]


def test_memory_time_and_assumptions_of_a_script_are_shown_on_demand(script, capsys):
    assert main(["estimate", "--from-flags", str(script), "--on", "H200", "-v"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("What went into it") == 1
    assert re.search(r"^ ?> ", shown, re.MULTILINE)  # the script's own plan beside the better one


def test_a_better_layout_is_shown_as_options_to_write_and_to_leave_out(script, capsys):
    assert main(["estimate", "--from-flags", str(script), "--on", "H200"]) == 0
    shown = capsys.readouterr().out
    changes = next(line for line in shown.splitlines() if line.startswith("write: "))
    assert "--moe-token-dispatcher-type" in changes or "--micro-batch-size" in changes


def test_options_to_write_can_be_pasted_into_a_shell():
    """A pipeline layout has characters that a shell would read as pipes and patterns."""
    script = mw.read_flags(EXAMPLE, on="H100").plan
    layout = "pp4,vpp4,ep4,mbs1,layout='Et*3|(t*4|)*2(t*3|)*12tL'"
    after = mw.estimate("Qwen3-30B-A3B", layout, on="16xH100", global_batch=512)
    changes = write_megatron_changes(script, after).write
    assert "|" in changes
    assert all(part.count("'") % 2 == 0 for part in changes.split(" --"))
    assert "--pipeline-model-parallel-layout 'E" in changes


def test_no_options_are_advised_for_a_device_that_megatron_does_not_run_on(capsys):
    assert main(["estimate", "--from-flags", str(EXAMPLE), "--on", "TPU-v5p"]) == 0
    shown = capsys.readouterr().out
    assert "Megatron-LM does not run on TPU v5p: no options to write" in shown
    assert "write: " not in shown
    assert "export: " not in shown


def test_options_of_forks_are_refused_on_demand(script, capsys, monkeypatch):
    monkeypatch.setenv("MORE", "--of-a-fork 3")
    arguments = ["estimate", "--from-flags", str(script), "--on", "H200"]
    assert main(arguments) == 0
    assert "--of-a-fork is no option of Megatron-LM and is left out" in capsys.readouterr().out
    assert main([*arguments, "--strict"]) == 2
    assert "--of-a-fork: is no option of Megatron-LM" in capsys.readouterr().err


def test_a_captured_command_is_planned_like_a_script_that_is_read(script, capsys, tmp_path):
    captured = tmp_path / "captured.json"
    read = tmp_path / "read.json"
    assert (
        main(["capture", "--on", "H200", "--json", str(captured), "--", "bash", str(script)]) == 0
    )
    assert main(["export", "--from-flags", str(script), "--on", "H200", "--json", str(read)]) == 0
    capsys.readouterr()
    assert captured.read_text() == read.read_text()


def test_capture_needs_one_source(capsys):
    assert main(["capture", "--on", "H200"]) == 2
    assert "exactly one is needed: a command, a process, or a log" in capsys.readouterr().err
    assert main(["capture", "--on", "H200", "--pid", "99999999"]) == 2
    assert "--pid=99999999: cannot be looked at" in capsys.readouterr().err
    assert main(["capture", "--on", "H200", "--", "true"]) == 2
    assert "no command here starts pretrain_gpt.py" in capsys.readouterr().err


def test_a_script_for_another_target_leaves_its_notes_on_stderr(script, capsys, monkeypatch):
    monkeypatch.setenv("EP", "4")
    assert main(["export", "--from-flags", str(script), "--on", "H200", "--to", "megatron"]) == 0
    done = capsys.readouterr()
    assert done.out.startswith("#!/bin/sh\n")
    assert "--expert-model-parallel-size 4" in done.out
    assert "by its sizes" in done.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("estimate --from-flags {script}", "--on: is needed: a script does not name its devices"),
        ("estimate --from-flags {script} --on 16xH200", "the script starts 1 x 8 = 8 ranks"),
        (
            "estimate --from-flags {script} --on H200 --layout ep8",
            "--layout: the script of --from-flags says it",
        ),
        (
            "estimate Llama-2-7b --from-flags {script} --on H200",
            "--num-layers=48: meta-llama/Llama-2-7b has 32",
        ),
        ("estimate --on H200", "model"),
        ("export --to megatron", "exactly one is needed"),
        ("export {script} --from-flags {script}", "exactly one is needed"),
        ("export plan.json", "--to: is needed with a plan"),
        ("export --from-flags nowhere.sh --on H200", "no such file"),
        ("export --from-flags {script} --on H900", "known: "),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, expected, script, capsys):
    assert main(arguments.format(script=script).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"EP": "7"}, "pretrain.sh: --expert-model-parallel-size=7"),
        (
            {"GBS": "60"},
            "--global-batch-size=60: micro-batch 1 x data-parallel 8 = 8 must divide it",
        ),
        ({"MORE": "--overlap-param-gather"}, "param needs grad"),
        ({"MORE": "--context-parallel-size 2 --cp-comm-type ring"}, "--cp-comm-type"),
    ],
)
def test_what_is_illegal_in_a_script_is_named_as_the_script_says_it(
    more, expected, script, capsys, monkeypatch
):
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert main(["estimate", "--from-flags", str(script), "--on", "H200"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_the_length_of_training_is_said_in_steps_or_tokens(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    estimate = ["estimate", "Qwen3-30B-A3B", "--on", "8xH200", "--layout", "ep8"]
    assert main([*estimate, "--tokens", "1G", "--json", str(plan)]) == 0
    assert json.loads(plan.read_text())["workload"]["steps"] == 1908  # of 128 x 4096 tokens
    assert main(["export", str(plan), "--to", "megatron"]) == 0
    assert "--train-iters 1908" in capsys.readouterr().out
    assert main([*estimate, "--steps", "7", "--json", str(plan)]) == 0
    assert json.loads(plan.read_text())["workload"]["steps"] == 7
    capsys.readouterr()
    assert main([*estimate, "--steps", "7", "--tokens", "1G"]) == 2
    assert "--tokens: excludes --steps" in capsys.readouterr().err
    assert main([*estimate, "--steps", "0"]) == 2
    assert "--steps=0: must be at least 1" in capsys.readouterr().err


def test_a_script_that_does_not_tell_its_devices_needs_a_count(tmp_path, capsys):
    script = tmp_path / "run.sh"
    model = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 32000"
    batch = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --bf16"
    count = "$(nvidia-smi -L | wc -l)"
    script.write_text(f"torchrun --nproc_per_node {count} pretrain_gpt.py {model} {batch}\n")
    assert main(["estimate", "--from-flags", str(script), "--on", "H200"]) == 2
    error = capsys.readouterr().err
    assert "--on=H200: needs a count" in error
    assert "nearest legal value: 8xH200" in error
    assert main(["estimate", "--from-flags", str(script), "--on", "8xH200"]) == 0
