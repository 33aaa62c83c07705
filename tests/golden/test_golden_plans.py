"""Whole plans as text, so that a change of rules, prices or defaults shows as a readable diff.

To accept a change, write the new text: `moewright <arguments> > tests/golden/<name>.txt`, from the
repository's root. machine_2cpu.toml is a hardware file that `moewright bench machine` measured on
two cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.cli.main import main

GOLDEN = Path(__file__).parent
ROOT = GOLDEN.parents[1]
CASES = {
    "quickstart_plan": [
        "plan",
        "recipes/quickstart_2cpu_bf16.toml",
        "--on",
        "2xtests/golden/machine_2cpu.toml",
    ],
    "qwen3_235b_estimate": [
        "estimate",
        "Qwen3-235B-A22B",
        "--on",
        "256xH800",
        "--global-batch",
        "2048",
        "--layout",
        "tp2,ep8,pp8,mbs1,recompute=select",
    ],
    "deepseek_v3_estimate": [
        "estimate",
        "DeepSeek-V3",
        "--on",
        "256xH100",
        "--layout",
        "ep64,pp4,vpp4,mbs1,recompute=mla_up_proj+moe_act,dispatcher=deepep,"
        "layout='Et*3|(tttt|)*14,tt,m,L'",
    ],
}

EXIT_CODES = {"deepseek_v3_estimate": 3}  # it does not fit


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_the_plan_reads_as_before(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(CASES[name]) == EXIT_CODES.get(name, 0)
    assert capsys.readouterr().out == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
