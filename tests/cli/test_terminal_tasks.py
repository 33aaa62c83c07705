"""What a newcomer asks on 80 columns: each answer has its word, and nothing is cut."""

import sys

import pytest

from moewright.api.catalogues import hardware, models
from moewright.cli.catalogues import fit_table
from moewright.cli.main import main

COLUMNS = 80
MOE = "OLMoE-1B-7B-0924 --on 4xH100 --global-batch 64"
QWEN = "estimate Qwen3-30B-A3B"
# The question, the command, and what the answer says; a refusal where that begins with its field.
TASKS = (
    ("does it fit?", f"{QWEN} --on 16xH100 --layout ep8,mbs1,recompute=full", "verdict   fits"),
    (
        "how far from the best?",
        f"{QWEN} --on 16xH100 --layout tp8,ep8,mbs1",
        "slower than a layout",
    ),
    ("beside what others ran?", f"{QWEN} --on 16xH100 --layout tp2,ep8,mbs1", "Nearest published"),
    ("devices in my own letters", f"{QWEN} --on 16h100 --layout ep8", "16 x H100 SXM"),
    ("devices as nodes", [*QWEN.split(), "--on", "2 nodes H100", "--layout", "ep8"], "16 x H100"),
    ("is 4k 4,096?", f"{QWEN} --on 16xH100 --seq-len 4k --layout ep8", "4k is 4,000 tokens"),
    ("why not tp3?", f"{QWEN} --on 16xH100 --layout tp3,ep8", "--layout tp=3: tp * cp = 3 must"),
    ("a name with a slip", "estimate Qwen3-30B-A3 --on 16xH100", "legal value: Qwen/Qwen3-30B-A3B"),
    ("a format of another part", f"{QWEN} --on 8xH100 --precision mxfp8", "legal value: fp8"),
    ("are fewer bits faster?", f"{QWEN} --on 16xH100 --layout ep8 --precision fp8", "than in bf16"),
    ("and with adapters?", f"{QWEN} --on 8xH100 --layout ep8,mbs1 --lora r=16", "verdict   fits"),
    ("which layout is best?", f"plan {MOE}", "fits"),
    ("why not that one?", f"plan {MOE} --why-not tp4", "slower than the first"),
    ("would more chunks or cp help?", f"plan {MOE} -v", "One step further, cp2"),
    ("which models are there?", "models qwen3 235b", "Qwen/Qwen3-235B-A22B"),
    ("which devices?", "hardware", "GB300"),
    ("how many days?", f"budget {MOE} --tokens 100B", "device-hours"),
    ("15 what?", f"budget {MOE} --tokens 15", "--tokens=15: is fewer tokens than any"),
    ("what can it do?", "--help", "finetune"),
    ("a dense model", "estimate Llama-3.1-8B --on 8xH100 --layout tp2,mbs1", "verdict   fits"),
    ("devices as 2x8", f"{QWEN} --on 2x8xH100 --layout ep8", "16 x H100 SXM"),
    ("devices in the plural", [*QWEN.split(), "--on", "16 H100s", "--layout", "ep8"], "16 x H100"),
    ("the count last", f"{QWEN} --on H100x16 --layout ep8", "16 x H100 SXM"),
    ("a part of another vendor", f"{QWEN} --on 16xMI300X --layout ep8", "16 x MI300X"),
    ("a device with a slip", f"{QWEN} --on 16xH10 --layout ep8", "nearest legal value: 16xH100"),
    ("no device", "plan Qwen3-30B-A3B", "nearest legal value: --on 8xH100"),
    ("a name in small letters", "estimate qwen3-30b-a3b --on 16xH100 --layout ep8", "verdict"),
    ("layout in capitals", f"{QWEN} --on 16xH100 --layout TP2,EP8", "tp2,pp1,ep8,mbs1"),
    (
        "layout with spaces",
        [*QWEN.split(), "--on", "16xH100", "--layout", "tp2, ep8"],
        "tp2,pp1,ep8,mbs1",
    ),
    ("a key with a slip", f"{QWEN} --on 16xH100 --layout tpp2", "nearest legal value: tp"),
    (
        "a member with a slip",
        f"{QWEN} --on 16xH100 --layout ep8,dispatcher=deepepp",
        "nearest legal value: deepep",
    ),
    ("tokens in bytes", f"{QWEN} --on 16xH100 --seq-len 4kb --layout ep8", "4Ki (4,096)"),
    ("tokens with a comma", f"{QWEN} --on 16xH100 --seq-len 4,096 --layout ep8", "sequence 4,096"),
    (
        "a batch that does not divide",
        f"{QWEN} --on 16xH100 --global-batch 100 --layout ep8",
        "nearest legal value: 96 or 112",
    ),
    ("no batch", f"{QWEN} --on 16xH100 --global-batch 0", "nearest legal value: 1"),
    ("a rank of no adapter", f"{QWEN} --on 16xH100 --lora r=0", "nearest legal value: r=16"),
    ("a verb with a slip", "plann Qwen3-30B-A3B --on 16xH100", 'Did you mean "plan"?'),
    ("figures of a device", "hardware H100", "bf16_TFLOPs"),
    ("a model that nobody knows", "models nothinglikethis", "in no name of a model"),
    ("a log that is not there", "diagnose nosuch.log", "no such run folder, trace or log"),
    ("a job that is not there", "train nosuch.toml", "no such file"),
)
assert len(TASKS) >= 40


@pytest.mark.turns
@pytest.mark.parametrize(
    ("command", "word"), [task[1:] for task in TASKS], ids=[task[0] for task in TASKS]
)
def test_a_task_on_a_terminal(command, word, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    code = main(command.split() if isinstance(command, str) else command)
    captured = capsys.readouterr()
    wide = [line for line in captured.out.splitlines() if len(line.rstrip()) > COLUMNS]
    assert all(" " not in line.strip() for line in wide)  # what is to be copied is never broken
    said = " ".join(f"{captured.out} {captured.err}".split())
    assert " ".join(word.split()) in said
    assert "…" not in said
    is_refusal = not captured.out.strip()
    assert code in ((2,) if is_refusal else (0, 3))  # 3: it does not fit
    if is_refusal:
        assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("table", [models(), hardware()], ids=["models", "hardware"])
@pytest.mark.parametrize("width", [60, 80, 120, 400])
def test_a_catalogue_fits_its_terminal_and_cuts_no_name(table, width):
    rows = table.to_rows()
    lines = fit_table(rows, width)
    name = next(iter(rows[0]))
    assert [line.split("  ")[0] for line in lines[1 : len(rows) + 1]] == [row[name] for row in rows]
    assert max(map(len, lines[: len(rows) + 1])) <= max(width, len(lines[1]) * (width == 400))
    rest = lines[len(rows) + 1 :]
    if width < 400:
        assert rest[0].startswith("left out here: ")
        assert "source" in " ".join(rest)
        assert max(map(len, rest)) <= width
