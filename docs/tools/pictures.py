"""Take the pictures of the studio's pages for the docs: on a desk, a tablet, a phone, and dark.

`make pictures` runs it after `make train`; names of pages take theirs alone. It needs chromium and
playwright.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "studio"
_JOB = "model=Qwen/Qwen3-235B-A22B&on=256xH800&seq_len=4096&global_batch=2048&precision=bf16"
_LAYOUT = "layout=tp2,ep8,pp8,vpp2,mbs1,recompute=full"
_SMALL = "model=Qwen/Qwen3-30B-A3B&on=16xH100&seq_len=4096&global_batch=512&precision=bf16"
_LOOKS = (  # of each picture: what its name ends with, width, height, colours
    ("", 1440, 900, "light"),
    ("_tablet", 820, 1180, "light"),
    ("_phone", 390, 844, "light"),
    ("_dark", 1440, 900, "dark"),
)
_PAGES = (  # name, address, what says that it is ready
    ("plan", f"?{_JOB}&{_LAYOUT}", "#verdict:not([data-quality='unjudged'])"),
    ("top", f"top?{_SMALL}&layout=ep8", "html[data-results='final']"),
    ("timetable", f"timetable?{_JOB}&{_LAYOUT}", "html[data-timetable]"),
    (
        "compare",
        f"compare?{_SMALL}&layout=tp2,ep8,mbs1,recompute=full&with=ep8,mbs1,recompute=full",
        "[data-change]",
    ),
    (
        "budget",
        f"budget?{_SMALL}&layout=ep8&tokens=1T&price=2",
        "[data-fewest]:not([data-fewest='0'])",
    ),
    (
        "design",
        "design?model=Qwen3-30B-A3B&on=8xH100&days=7&max_total=8B",
        "h1:has-text('7 days on 8')",
    ),
    ("runs", "runs?run=runs/quickstart", "html[data-stamp]"),
    ("watch", "watch?log=runs/quickstart", "h1:has-text('step ')"),
    ("share", f"share?{_SMALL}&layout=ep8,mbs1,recompute=full", "[data-target]"),
    ("learn", "learn/pipelines", "html[data-ready]"),
)
_FOLD = """() => {
  const controls = document.getElementById("controls");
  if (controls) controls.open = innerWidth > 1020;
  scrollTo(0, 0);
}"""
_ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def main(names: list[str]) -> None:
    """Start a studio, and take the pictures of the pages that are named, or of all."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as player:
        command = [sys.executable, "-m", "moewright", "studio", "--port", "0", "--read-only"]
        studio = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert studio.stdout is not None
        address = re.search(r"(http://[^/]+/)\?(token=\S+)", studio.stdout.readline())
        assert address is not None
        browser = player.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        pages = [page for page in _PAGES if not names or page[0] in names]
        for name, query, ready in pages:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            path, _, params = query.partition("?")
            page.goto(f"{address[1]}{path}?{address[2]}&{params}")
            page.wait_for_selector(ready, timeout=120_000, state="attached")
            # A search is asked for once: what a page shows fits itself to a screen that changes.
            for look, width, height, scheme in _LOOKS:
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": height})
                page.evaluate(_FOLD)
                page.wait_for_timeout(700)
                page.screenshot(path=FOLDER / f"{name}{look}.png")
            page.close()
        browser.close()
        studio.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
