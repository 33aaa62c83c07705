"""A step on a card: an operation's tensors all lie there, and the host waits for few numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_DRAWS = 4
# Functions that pass numbers between host and card, and why.
PASSES = {
    "to the card: engine/model/micro_batch.<lambda>",  # tokens and targets, from pinned memory
    "read: engine/run/step.forward_backward",  # the targets of the global batch, once a step
    "from the card: engine/run/step._run_passes",  # losses and the norm, once a step
}
# Modules that send what a layout offloads, and fetch it.
OFFLOADS = ("engine/optim/", "engine/memory/saved_tensors.")


def test_drawn_jobs_run_on_a_card_and_wait_for_few_numbers() -> None:
    day = os.environ.get("DRAWS_OF") or date.today().isoformat()
    process = subprocess.run(
        [sys.executable, TESTS / "card_without_data.py", *(f"{day} {n}" for n in range(_DRAWS))],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    sites = json.loads(process.stdout.splitlines()[-1])
    beyond = [site for site in sites.keys() - PASSES if not site.split()[-1].startswith(OFFLOADS)]
    assert not beyond, process.stderr
