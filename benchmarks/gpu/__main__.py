"""`python -m benchmarks.gpu`: measure one GPU, in two commands of eight minutes, on one page."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from benchmarks.command import run_command
from moewright.codec import write_text
from moewright.spec.errors import BadInput, Reason

# A card is lent for ten minutes a command; starting and carrying home takes some of it.
_BUDGET_S = 480.0
_PARTS_MODULE = "benchmarks.gpu.parts"
# The least time in which a part that is left over is worth starting.
_LEAST_S = 5.0
# How the section of a part begins that did not end well, which the next command runs again.
_UNDONE = ("Failed", "Not run")


def measure_gpu(
    *,
    out: Path = Path("docs/gpu"),
    part: Literal["all", "tests", "speed"] = "all",
    rehearse: bool = False,
    only: tuple[str, ...] = (),
) -> int:
    """Measure this machine's first GPU part by part, and write the page after each.

    The same command goes on after one that was cut off: what ended well is on the page already. A
    part that fails, or takes longer than it may, is named on the page; the others run. What each
    says as it goes is in a log beside the page.

    Parameters
    ----------
    out
        Where the page and the logs go, named by the card.
    part
        The tests, what measures speed and memory, or all of it.
    rehearse
        Go through all parts on a CPU, with tiny sizes.
    only
        The sections to run, whatever the page has of them.
    """
    import torch

    from benchmarks.gpu.parts import PARTS

    for name in only:
        if name not in PARTS:
            rule = f"is no part; parts are {', '.join(PARTS)}"
            raise BadInput(Reason(field="--only", value=name, rule=rule, nearest=next(iter(PARTS))))
    if not rehearse and not torch.cuda.is_available():
        rule = "needs a CUDA device, and this machine has none"
        raise BadInput(Reason(field="make gpu", rule=rule, nearest="--rehearse"))
    card = "rehearsal" if rehearse else torch.cuda.get_device_name(0)
    stem = re.sub("[^a-z0-9]+", "_", card.casefold()).strip("_")
    page = out / f"{stem}.md"
    deadline = time.monotonic() + _BUDGET_S
    sections = dict(_read_sections(page))
    titles = [PARTS[name].title for name in PARTS]
    for name, asked in PARTS.items():
        is_asked = name in only if only else part in ("all", asked.group)
        is_done = not sections.get(asked.title, _UNDONE[0]).startswith(_UNDONE)
        if not is_asked or (is_done and not only):
            continue
        started = time.monotonic()
        limit_s = min(asked.limit_s, deadline - started)
        log = out / f"{stem}_{name}.log"
        text = _run_part(name, limit_s, log, rehearse=rehearse)
        seconds = time.monotonic() - started
        sections[asked.title] = f"{text}\n\n*{seconds:.0f} s.*"
        kept = {title: sections[title] for title in titles if title in sections}
        write_text(page, _write_page(card, kept))
        ended = "failed" if text.startswith(_UNDONE) else "done"
        print(f"{name}: {ended} in {seconds:.0f} s", flush=True)
    print(f"wrote {page}")
    return 1 if any(text.startswith(_UNDONE) for text in sections.values()) else 0


def _read_sections(page: Path) -> Mapping[str, str]:
    """Return the sections of a page by their titles; none where there is no page yet."""
    if not page.exists():
        return {}
    _, *parts = page.read_text(encoding="utf-8").split("\n## ")
    return {title: text.strip() for title, _, text in (part.partition("\n") for part in parts)}


def _write_page(card: str, sections: Mapping[str, str]) -> str:
    import torch

    head = (
        f"# {card}\n\nMeasured by `make gpu` with torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, Python {sys.version.split()[0]}."
    )
    return (
        "\n\n".join((head, *(f"## {title}\n\n{text}" for title, text in sections.items()))) + "\n"
    )


def _run_part(name: str, limit_s: float, log: Path, *, rehearse: bool) -> str:
    """Run a part in a process of its own, which writes to `log`; return its section."""
    if limit_s < _LEAST_S:
        return f"{_UNDONE[1]}: no time was left."
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, log.open("w", encoding="utf-8") as output:
        target = Path(scratch, "section.md")
        command = [sys.executable, "-m", _PARTS_MODULE, name, str(target)]
        if rehearse:
            command.append("--rehearse")
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"Failed: it took longer than {limit_s:.0f} s; last: `{_last_line(log)}`"
        if done.returncode or not target.exists():
            return f"Failed with code {done.returncode}: `{_last_line(log)}`"
        return target.read_text(encoding="utf-8")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing was said"


if __name__ == "__main__":
    run_command("benchmarks.gpu", measure_gpu)
