"""Checks of changes: known differences, neutral changes, budgets, commits, and formats of CI."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import floor
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml

import moewright as mw
from moewright.cli.main import main
from moewright.codec import write_json
from moewright.diagnosis.checks import (
    BudgetBreach,
    ChangeBudgets,
    Check,
    JobCheck,
    MeasureBudget,
    find_breaches,
)
from moewright.diagnosis.plan_changes import Measure, MeasureChange, PlanChanges, compare_plans
from moewright.report.check_document import render_sarif
from moewright.spec.errors import BadInput
from moewright.spec.plan import Verdict

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "check" / "action.yml"
EXAMPLE = ROOT / "examples" / "qwen3_30b_16h100.sh"
# Without what no layout cuts, and with as many rows for every expert: shares are whole.
SCRIPT = EXAMPLE.read_text().replace("  --qk-layernorm \\\n", "")
SCRIPT = SCRIPT.replace(
    "--moe-grouped-gemm", "--moe-grouped-gemm --moe-router-force-load-balancing"
)
HALF, TWICE = Fraction(1, 2), Fraction(2)
# Nothing may grow, and nothing that trains may change.
NO_GROWTH = ChangeBudgets(
    **{measure.value: MeasureBudget(growth=0.0) for measure in Measure},
    verdict=Verdict.FITS,
    keep_training=True,
)


def edit(text: str, *edits: tuple[str, str]) -> str:
    """Return a script with options replaced; "" as the first half adds the second."""
    for old, new in edits:
        if old:
            assert re.search(old, text), old
            text = re.sub(old, new, text)
        else:
            text = text.replace("pretrain_gpt.py \\\n", f"pretrain_gpt.py {new} \\\n")
    return text


def check_texts(folder: Path, before: str, after: str) -> JobCheck:
    for name, text in (("before.sh", before), ("after.sh", after)):
        (folder / name).write_text(text)
    (job,) = mw.check(folder / "before.sh", folder / "after.sh", on="H100", budgets=NO_GROWTH).jobs
    return job


def ratios(changes: PlanChanges) -> dict[str, Fraction]:
    """Return each row's bytes, calls or FLOPs over those before; rows that are alike left out."""
    return {
        f"{row.section}: {row.label}": Fraction(int(row.after), int(row.before))
        for row in changes.rows
        if row.before and row.pp_rank == changes.fullest
    }


# A change, the switch that it is, and what the arithmetic of Megatron-LM's layouts makes of rows:
# what is cut twice as finely halves, what there is twice as much of doubles.
CHANGES = [
    (
        "ep",
        [("expert-model-parallel-size 8", "expert-model-parallel-size 16")],
        {"memory: weights / experts": HALF, "memory: gradients / experts": HALF},
    ),
    (
        "tp",
        [("tensor-model-parallel-size 2", "tensor-model-parallel-size 4")],
        {
            "memory: weights / attention": HALF,
            "memory: weights / embedding": HALF,
            "memory: activations / attention": HALF,
        },
    ),
    (
        "pp",
        [("pipeline-model-parallel-size 1", "pipeline-model-parallel-size 2")],
        {"memory: weights / experts": HALF, "memory: weights / router": HALF},
    ),
    (
        "cp",
        [("context-parallel-size 1", "context-parallel-size 2")],
        {"memory: activations / attention": HALF, "memory: logits / head": HALF},
    ),
    (
        "etp",
        [("expert-tensor-parallel-size 1", "expert-tensor-parallel-size 2")],
        {"memory: weights / experts": HALF},
    ),
    (
        "mbs",
        [("micro-batch-size 1", "micro-batch-size 2")],
        {
            "memory: activations / attention": TWICE,
            "memory: logits / head": TWICE,
            "calls: all to all / ep": HALF,
        },
    ),
    (
        "global_batch",
        [("global-batch-size 512", "global-batch-size 1024")],
        {
            "flops: grouped gemm / experts": TWICE,
            "calls: all to all / ep": TWICE,
            "comm: all to all / ep": TWICE,
        },
    ),
    (
        "seq_len",
        [("seq-length 4096", "seq-length 8192")],
        {
            "flops: attention / attention": Fraction(4),
            "flops: gemm / attention": TWICE,
            "memory: logits / head": TWICE,
        },
    ),
    (
        "layers",
        [("num-layers 48", "num-layers 24")],
        {
            "memory: weights / experts": HALF,
            "memory: weights / attention": HALF,
            "flops: gemm / attention": HALF,
            "calls: all to all / ep": HALF,
        },
    ),
    (
        "num_experts",
        [("num-experts 128", "num-experts 64")],
        {"memory: weights / experts": HALF, "memory: weights / router": HALF},
    ),
    (
        "experts_per_token",
        [("router-topk 8", "router-topk 4")],
        {"flops: grouped gemm / experts": HALF},
    ),
    (
        "ffn",
        [("moe-ffn-hidden-size 768", "moe-ffn-hidden-size 1536")],
        {"memory: weights / experts": TWICE, "flops: grouped gemm / experts": TWICE},
    ),
    (
        "vocab",
        [
            ("vocab-size 151936", "vocab-size 303872"),
            ("eod-id 151935", "eod-id 303871"),
        ],
        {"memory: weights / embedding": TWICE, "flops: gemm / head": TWICE},
    ),
    (
        "grad_dtype",
        [("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16")],
        {"memory: gradients / attention": HALF, "memory: gradients / experts": HALF},
    ),
    (
        "query_groups",
        [
            ("num-query-groups 4", "num-query-groups 8"),
        ],
        {"memory: weights / attention": Fraction(2 * 32 + 2 * 8, 2 * 32 + 2 * 4)},
    ),
    ("zero", [("--use-distributed-optimizer", "")], {}),
    ("order of overlap", [("", "--overlap-grad-reduce")], {}),
    (
        "graphs",
        [("--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather")],
        {},
    ),
    ("recompute", [("layernorm moe_act", "layernorm moe_act core_attn")], {}),
    ("fp8", [("--bf16", "--bf16 --fp8-format hybrid")], {}),
]


@pytest.mark.parametrize(("name", "edits", "expected"), CHANGES, ids=[case[0] for case in CHANGES])
def test_a_change_is_counted_as_its_arithmetic_says(
    tmp_path: Path, name: str, edits: list[tuple[str, str]], expected: dict[str, Fraction]
) -> None:
    job = check_texts(tmp_path, SCRIPT, edit(SCRIPT, *edits))
    assert job.changes is not None
    assert job.changes.switches
    counted = ratios(job.changes)
    assert {row: counted.get(row, Fraction(1)) for row in expected} == expected
    assert job.changes.rows or job.changes.find(Measure.STEP).growth
    # The other way round the budgets of one side at least are broken.
    back = check_texts(tmp_path, edit(SCRIPT, *edits), SCRIPT)
    assert job.breaches or back.breaches


def shuffle(text: str, seed: int) -> str:
    """Return the script with its options in another order."""
    head, _, options = text.partition("pretrain_gpt.py \\\n")
    lines = [line.strip().removesuffix("\\").strip() for line in options.splitlines()]
    random.Random(seed).shuffle(lines)
    return f"{head}pretrain_gpt.py {' '.join(lines)}\n"


def spell_with_equals(text: str) -> str:
    return re.sub(r"(--[a-z-]+) (\d[\w.-]*) \\", r"\1=\2 \\", text)


def name_by_variables(text: str) -> str:
    """Return the script with its options in an array, and two values in variables."""
    head, _, options = text.partition("pretrain_gpt.py \\\n")
    options = options.replace(" \\\n", "\n").replace("--seq-length 4096", "--seq-length ${SEQ}")
    first, _, command = head.rpartition("torchrun ")
    return (
        f"{first}SEQ=$((1024 * 4))\nARGS=(\n{options})\n"
        f'torchrun {command}pretrain_gpt.py "${{ARGS[@]}}"\n'
    )


NEUTRAL = {
    "comments": lambda text: f"{text}\n# --tensor-model-parallel-size 4\n",
    "blank lines": lambda text: text.replace("export", "\n\nexport"),
    "spaces": lambda text: text.replace("  --", "\t    --"),
    "one line": lambda text: text.replace(" \\\n", " "),
    "equals": spell_with_equals,
    "quotes": lambda text: text.replace("--seq-length 4096", "--seq-length '4096'"),
    "numbers": lambda text: text.replace("0.0003", "3e-4").replace("1e-06", "0.000001"),
    "variables": name_by_variables,
    "bash": lambda text: text.replace("#!/bin/sh", "#!/usr/bin/env bash\nset -euxo pipefail"),
    **{f"order {seed}": partial(shuffle, seed=seed) for seed in range(6)},
}


@pytest.mark.parametrize("change", NEUTRAL.values(), ids=NEUTRAL)
def test_a_neutral_change_raises_no_alarm(tmp_path: Path, change: Callable[[str], str]) -> None:
    text = EXAMPLE.read_text()
    assert change(text) != text
    job = check_texts(tmp_path, text, change(text))
    assert job.changes is not None
    assert job.changes.is_neutral
    assert job.changes.rows == ()
    assert job.options == ()
    assert job.breaches == ()


def test_data_that_move_and_saves_that_come_oftener_are_told_and_break_nothing(
    tmp_path: Path,
) -> None:
    before = edit(SCRIPT, ("--mock-data", "--data-path /a/text --save /c --save-interval 5000"))
    after = edit(before, ("/a/text", "/b/text"), ("5000", "1000"))
    job = check_texts(tmp_path, before, after)
    assert job.changes is not None
    assert {switch.field for switch in job.changes.switches} == {
        "workload.data.train",
        "workload.checkpoint.every_steps",
    }
    assert job.changes.is_neutral
    assert job.breaches == ()


def test_what_scripts_leave_open_is_set_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the refusal says it, on every face."""
    monkeypatch.chdir(tmp_path)
    sizes = r"  --(padded-)?vocab-size 151936 \\\n|  --null-tokenizer-eod-id 151935 \\\n"
    before = re.sub(sizes, "", SCRIPT).replace("NullTokenizer", "HuggingFaceTokenizer")
    Path("a.sh").write_text(before)
    Path("b.sh").write_text(edit(before, ("micro-batch-size 1", "micro-batch-size 2")))
    command = ["check", "a.sh", "b.sh", "--on", "H100"]
    assert main(command) == 2
    given = "--vocab-size=128000"
    assert f"--set {given}" in capsys.readouterr().err
    assert main([*command, "--set", given]) == 0
    check = mw.check("a.sh", "b.sh", on="H100", overrides=(given,))
    assert [str(switch) for switch in check.jobs[0].changes.switches] == ["micro-batch: 1 -> 2"]
    Path("moewright.toml").write_text(
        f"[[jobs]]\npath = 'a.sh'\non = 'H100'\noverrides = ['{given}']\n"
    )
    assert mw.check(".", ".").jobs[0].changes.is_neutral
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    write_json(Path("a.json"), plan)
    with pytest.raises(BadInput, match="--set=--vocab-size=128000: is for scripts"):
        mw.check("a.json", "a.json", overrides=(given,))


def test_options_that_are_not_planned_are_told_and_break_nothing(tmp_path: Path) -> None:
    after = SCRIPT.replace("--log-interval 1", "--log-interval 10").replace("--mock-data", "")
    job = check_texts(tmp_path, SCRIPT, after)
    assert job.changes is not None
    assert job.changes.is_neutral
    assert [(o.name, o.before, o.after) for o in job.options] == [
        ("--log-interval", "1", "10"),
        ("--mock-data", "on", ""),
    ]


def test_errors_that_two_predictions_share_cancel_in_their_ratio(tmp_path: Path) -> None:
    """A change of the batch alone makes the same choices: nothing is uncertain in the ratio."""
    after = edit(SCRIPT, ("global-batch-size 512", "global-batch-size 1024"))
    changes = check_texts(tmp_path, SCRIPT, after).changes
    assert changes is not None
    assert changes.step_ratio_80 == (changes.step_ratio, changes.step_ratio)
    step = changes.find(Measure.STEP)
    assert step is not None
    assert step.interval_80[0] < step.after < step.interval_80[1]
    other = edit(SCRIPT, ("context-parallel-size 1", "context-parallel-size 2"))
    low, high = check_texts(tmp_path, SCRIPT, other).changes.step_ratio_80
    assert low < high


def test_padded_capacities_take_every_graph_break_away(tmp_path: Path) -> None:
    """Each of 48 layers read its sizes in each of 64 micro-batches; nobody does any more."""
    text = EXAMPLE.read_text()
    padded = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
    changes = check_texts(tmp_path, text, edit(text, ("", padded))).changes
    assert changes is not None
    breaks = changes.find(Measure.GRAPH_BREAKS)
    assert breaks is not None
    assert (breaks.before, breaks.after) == (48 * 64, 0)
    assert changes.graph_obstacles_before == ("layout.rank_capacity=0",)
    assert changes.graph_obstacles_after == ()
    back = check_texts(tmp_path, edit(text, ("", padded)), text)
    assert "graph_breaks.growth" in [breach.budget for breach in back.breaches]


@pytest.mark.parametrize("path", ["runs/train.sh", "my runs/#1 50%?.sh", "a:b.sh", "über.sh"])
def test_paths_of_a_sarif_log_are_uri_references(path: str) -> None:
    breach = BudgetBreach(budget="calls.most", text="calls are 2")
    job = JobCheck(path=path, changes=None, breaches=(breach,), line=3)
    check = Check(before="was", after="now", jobs=(job,))
    (result,) = json.loads(str(render_sarif(check)))["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    parts = urlsplit(uri)
    assert (parts.scheme, parts.query, parts.fragment) == ("", "", "")
    assert re.fullmatch(r"[!-~]+", uri)
    assert unquote(parts.path) == path


def test_budgets_of_a_file_decide_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text(SCRIPT)
    Path("b.sh").write_text(edit(SCRIPT, ("micro-batch-size 1", "micro-batch-size 4")))
    command = ["check", "a.sh", "b.sh", "--on", "H100"]
    assert main([*command, "--json", "free.json"]) == 3  # it does not fit any more
    Path("moewright.toml").write_text(
        "[budgets]\nsaved_bytes = { growth = 0.1 }\ncalls = { most = 1e3 }\n"
    )
    files = ["--markdown", "c.md", "--sarif", "c.sarif", "--junit", "c.xml", "--json", "c.json"]
    assert main([*command, *files]) == 4
    out = capsys.readouterr().out
    assert "over budget: saved_bytes grows by +300.00% to" in out
    data = json.loads(Path("c.json").read_text())
    breaches = [breach["budget"] for breach in data["jobs"][0]["breaches"]]
    assert breaches == ["saved_bytes.growth", "calls.most"]
    sarif = json.loads(Path("c.sarif").read_text())["runs"][0]
    assert [result["ruleId"] for result in sarif["results"]] == [*breaches, "fits"]
    place = sarif["results"][0]["locations"][0]["physicalLocation"]
    line = Path("b.sh").read_text().splitlines()[place["region"]["startLine"] - 1]
    assert "--micro-batch-size" in line
    suite = ElementTree.parse("c.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    # In the order that the schema of Ant's reports asks for.
    assert [part.tag for part in suite] == ["properties", "testcase", "system-out", "system-err"]
    assert [part.tag for part in suite[1]] == ["failure"]
    assert "over budget:" in Path("c.md").read_text()
    # The other way round memory falls and calls double, which no budget of growth is on.
    assert main(["check", "b.sh", "a.sh", "--on", "H100", "--budgets", "moewright.toml"]) == 4
    Path("moewright.toml").write_text("[budgets]\nsaved_bytes = { growth = 0.1 }\n")
    assert main(["check", "b.sh", "a.sh", "--on", "H100"]) == 0
    for text, message in (
        ("[budgets]\nstep = 3\n", "budgets.step: unknown key"),
        ("[budgets]\ncalls = { most = -1 }\n", "budgets.calls.most=-1: must be at least 0"),
        (
            "[budgets]\nverdict = 'good'\n",
            'budgets.verdict="good": must be one of fits, uncertain, oom',
        ),
    ):
        Path("moewright.toml").write_text(text)
        capsys.readouterr()
        assert main(command) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_of_growth_is_broken_by_what_is_over_it_alone(seed: int) -> None:
    """Exactly at the share that the file writes it is kept, and nothing twice keeps any."""
    rng = random.Random(seed)
    percent = rng.randint(-100, 300)
    before = rng.choice((0, rng.randint(1, 10**6)))
    most = Fraction(before * (100 + percent), 100)
    budgets = ChangeBudgets(calls=MeasureBudget(growth=percent / 100))
    plan = mw.estimate("OLMoE-1B-7B-0924", "ep4", on="4xH100")
    base = compare_plans(plan, plan)
    for after in {0, before, floor(most), floor(most) + 1}:
        change = MeasureChange(measure=Measure.CALLS, before=before, after=after)
        changes = replace(base, measures=(change,))
        assert bool(list(find_breaches(changes, budgets))) == (after > most)


def run_git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_commits_are_compared_by_the_jobs_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_git(tmp_path, "init", "--quiet", "-b", "main")
    # What a script reads beside itself is that of its own commit; where it lies is told alike.
    script = SCRIPT.replace(
        "export CUDA", 'HERE=$(cd "$(dirname "$0")" && pwd)\nsource $HERE/sizes.sh\nexport CUDA'
    ).replace("--seq-length 4096", "--seq-length $SEQ --data-path $HERE/data")
    # What only running tells is told alike too.
    script = script.replace("--data-path", "--tensorboard-dir $HERE/$(date +%F) --data-path")
    Path("jobs").mkdir()
    Path("jobs/run.sh").write_text(script)
    Path("jobs/sizes.sh").write_text("SEQ=4096\n")
    Path("moewright.toml").write_text(
        "[budgets]\nkeep_training = true\n[[jobs]]\npath = 'jobs/run.sh'\non = 'H100'\n"
    )
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "-m", "first")
    assert main(["check", "HEAD"]) == 0
    assert "nothing that is planned changes" in capsys.readouterr().out
    assert mw.check("HEAD").jobs[0].options == ()
    # A partial clone lacks files that no job reads.
    Path("data.bin").write_text("large")
    run_git(tmp_path, "add", "data.bin")
    run_git(tmp_path, "commit", "--quiet", "-m", "second")
    blob = run_git(tmp_path, "rev-parse", "HEAD:data.bin").strip()
    (tmp_path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert mw.check("HEAD").jobs[0].options == ()
    Path("jobs/sizes.sh").write_text("SEQ=8192\n")
    (job,) = mw.check("main").jobs
    assert [str(switch) for switch in job.changes.switches] == ["seq len: 4,096 -> 8,192"]
    assert [breach.budget for breach in job.breaches] == ["keep_training"]
    assert main(["check", "main:jobs/run.sh", "jobs/run.sh", "--on", "H100"]) == 4
    run_git(tmp_path, "mv", "jobs/run.sh", "jobs/other.sh")
    assert mw.check("main").jobs[0].note == "not in the working folder"
    with pytest.raises(BadInput, match=r"main:jobs/gone\.sh.*no such file"):
        mw.check("main:jobs/gone.sh", "jobs/other.sh", on="H100")
    monkeypatch.chdir(tmp_path / "jobs")
    (job,) = mw.check("main:jobs/run.sh", "other.sh", on="H100").jobs
    assert [switch.after for switch in job.changes.switches] == ["8,192"]


def test_a_refusal_of_a_commit_names_no_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may print its own name, and that of a commit was in a folder for a moment."""
    usage = 'if [ $# -lt 1 ]; then echo "Usage: $0 SIZE"; exit 1; fi\n'
    (tmp_path / "run.sh").write_text(f"{usage}{SCRIPT}")
    run_git(tmp_path, "init", "--quiet", "-b", "main")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="Usage: ") as refusal:
        mw.check("main:run.sh", "run.sh", on="H100")
    assert "/moewright-" not in str(refusal.value)


def test_the_action_checks_where_a_branch_starts(tmp_path: Path) -> None:
    """Its shell is run as the runner of GitHub runs it."""
    (tmp_path / "run.sh").write_text(SCRIPT)
    budgets = "[budgets]\ncalls = { growth = 0 }\n[[jobs]]\npath = 'run.sh'\non = 'H100'\n"
    (tmp_path / "moewright.toml").write_text(budgets)
    run_git(tmp_path, "init", "--quiet", "-b", "main")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "-m", "first")
    batch = ("global-batch-size 512", "global-batch-size 1024")
    (tmp_path / "run.sh").write_text(edit(SCRIPT, batch))
    action = yaml.safe_load(ACTION.read_text())
    step = next(step for step in action["runs"]["steps"] if step.get("id") == "check")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "RUNNER_TEMP": str(tmp_path / "temp"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "BEFORE": "",
        "AFTER": "",
        "BASE": "main",
        "DEFAULT_BRANCH": "main",
        "BUDGETS": "moewright.toml",
        "DEVICES": "",
    }
    assert set(step["env"]) <= set(environment)

    def run_step(base: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=tmp_path,
            env={**environment, "BASE": base},
            check=False,
            capture_output=True,
        )

    assert run_step("main").returncode == 0
    assert "exit-code=4\n" in (tmp_path / "output").read_text()
    assert "calls grows by +" in (tmp_path / "summary").read_text()
    assert (tmp_path / "temp" / "moewright-check" / "check.sarif").is_file()
    # A commit that a shallow checkout lacks is never taken for the default branch.
    (tmp_path / "output").unlink()
    failed = run_step("a" * 40)
    assert failed.returncode == 2
    assert b"::error::" in failed.stdout
    assert (tmp_path / "output").read_text() == "exit-code=2\n"
    # A new branch comes with zeros, a run by hand with nothing.
    run_git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    for base in ("0" * 40, ""):
        (tmp_path / "output").unlink()
        assert run_step(base).returncode == 0
        assert "exit-code=4\n" in (tmp_path / "output").read_text()


def test_jobs_and_plans_are_compared_too(tmp_path: Path) -> None:
    first = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    second = mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100")
    (job,) = mw.check(first, second).jobs
    assert [str(switch) for switch in job.changes.switches] == ["recompute: full -> none"]
    for name, plan in (("a.json", first), ("b.json", second)):
        write_json(tmp_path / name, plan)
    assert mw.check(tmp_path / "a.json", tmp_path / "b.json").jobs[0].changes == job.changes
    with pytest.raises(BadInput, match="the other side is none"):
        mw.check(first, tmp_path / "b.json")
