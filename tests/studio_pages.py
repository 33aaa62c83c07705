"""Addresses of the studio's pages, and what the command line says of the same."""

import json
import subprocess
import sys

QWEN = "model=Qwen/Qwen3-235B-A22B&on=256xH800&seq_len=4096&global_batch=2048&precision=bf16"


# Words that are cut in two although no hyphen is there; a word is what no space or <wbr> parts.
_BROKEN_WORDS = """() => {
  const broken = [], range = document.createRange();
  const root = document.getElementById("content");
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const match of node.data.matchAll(/[^\\s\\-\\/]+/g)) {
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1)
        broken.push(match[0]);
    }
  }
  return broken;
}"""


def check_phone(page):
    """Check that a page is no longer than a few screens of a phone, and breaks no word there."""
    assert page.evaluate(_BROKEN_WORDS) == []
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("document.getElementById('controls').open = false")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.documentElement.scrollHeight") < 4000
    assert page.evaluate(_BROKEN_WORDS) == []


def estimate_json(folder, query, layout):
    """Return what `moewright estimate --json` says of a query."""
    path = folder / "plan.json"
    command = [sys.executable, "-m", "moewright", "estimate", query["model"], "--on", query["on"]]
    command += ["--seq-len", query["seq_len"], "--global-batch", query["global_batch"]]
    command += ["--layout", layout, "--json", str(path)]
    subprocess.run(command, capture_output=True, check=False)
    return json.loads(path.read_text())
