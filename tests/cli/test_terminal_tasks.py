"""What a newcomer asks on 80 columns: each answer has its word, and nothing is cut."""

import pytest

from moewright.api.catalogues import hardware, models
from moewright.cli.catalogues import fit_table
from moewright.cli.main import main

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
    ("and with adapters?", f"{QWEN} --on 8xH100 --layout ep8,mbs1 --lora r=16", "verdict   fits"),
    ("which layout is best?", f"plan {MOE}", "fits"),
    ("why not that one?", f"plan {MOE} --why-not tp4", "slower than the first"),
    ("would more chunks or cp help?", f"plan {MOE} -v", "One step further, cp2"),
    ("which models are there?", "models qwen3 235b", "Qwen/Qwen3-235B-A22B"),
    ("which devices?", "hardware", "GB300"),
    ("how many days?", f"budget {MOE} --tokens 100B", "device-hours"),
    ("15 what?", f"budget {MOE} --tokens 15", "--tokens=15: is fewer tokens than any"),
    ("what can it do?", "--help", "finetune"),
)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("command", "word"), [task[1:] for task in TASKS], ids=[task[0] for task in TASKS]
)
def test_a_task_on_a_terminal(command, word, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code = main(command.split() if isinstance(command, str) else command)
    captured = capsys.readouterr()
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
    if width < 400:
        assert lines[-1].startswith("left out here: ")
        assert "source" in lines[-1]
