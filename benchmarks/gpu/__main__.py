"""`python -m benchmarks.gpu`: measure one GPU in nine minutes, and write docs/gpu/<card>.md."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command import run_command
from moewright.codec import write_text
from moewright.spec.errors import BadInput, Reason

# A card is lent for ten minutes at a time.
_BUDGET_S = 540.0
_PARTS_MODULE = "benchmarks.gpu.parts"
# The least time in which a part that is left over is worth starting.
_LEAST_S = 5.0


def measure_gpu(
    *, folder: Path = Path("docs/gpu"), rehearse: bool = False, only: tuple[str, ...] = ()
) -> int:
    """Measure this machine's first GPU part by part, and write the page after each.

    A part that fails, or takes longer than it may, is named on the page; the others run.

    Parameters
    ----------
    folder
        Where the page goes, named by the card.
    rehearse
        Go through all parts on a CPU, with tiny sizes.
    only
        The parts to run; without them all.
    """
    import torch

    from benchmarks.gpu.parts import PARTS

    for name in only:
        if name not in PARTS:
            rule = f"is no part; parts are {', '.join(PARTS)}"
            raise BadInput(Reason(field="--only", value=name, rule=rule, nearest="tests"))
    if not rehearse and not torch.cuda.is_available():
        rule = "needs a CUDA device, and this machine has none"
        raise BadInput(Reason(field="make gpu", rule=rule, nearest="--rehearse"))
    card = "rehearsal" if rehearse else torch.cuda.get_device_name(0)
    page = folder / f"{re.sub('[^a-z0-9]+', '_', card.casefold()).strip('_')}.md"
    deadline = time.monotonic() + _BUDGET_S
    sections = [f"# {card}\n\n{_describe(card)}"]
    failures = 0
    for name in only or tuple(PARTS):
        title, limit_s, _ = PARTS[name]
        started = time.monotonic()
        text, is_whole = _run_part(name, min(limit_s, deadline - started), rehearse=rehearse)
        failures += not is_whole
        seconds = time.monotonic() - started
        sections.append(f"## {title}\n\n{text}\n\n*{seconds:.0f} s.*")
        write_text(page, "\n\n".join(sections) + "\n")
        print(f"{name}: {'done' if is_whole else 'failed'} in {seconds:.0f} s", flush=True)
    print(f"wrote {page}")
    return 1 if failures else 0


def _describe(card: str) -> str:
    import torch

    return (
        f"Measured by `make gpu` with torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {sys.version.split()[0]}."
    )


def _run_part(name: str, limit_s: float, *, rehearse: bool) -> tuple[str, bool]:
    """Run a part in a process of its own; return its section, and whether it ended well."""
    if limit_s < _LEAST_S:
        return "Not run: no time was left.", False
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch, "section.md")
        command = [sys.executable, "-m", _PARTS_MODULE, name, str(target)]
        if rehearse:
            command.append("--rehearse")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"Failed: it took longer than {limit_s:.0f} s.", False
        lines = done.stderr.strip().splitlines() or ["nothing was said"]
        if done.returncode or not target.exists():
            return f"Failed with code {done.returncode}: `{lines[-1][:300]}`", False
        return target.read_text(encoding="utf-8"), True


if __name__ == "__main__":
    run_command("benchmarks.gpu", measure_gpu)
