"""Addresses of the studio's pages, and what the command line says of the same."""

import json
import subprocess
import sys
from pathlib import Path

QWEN = "model=Qwen/Qwen3-235B-A22B&on=256xH800&seq_len=4096&global_batch=2048&precision=bf16"


AXE = Path(__file__).parent / "browser" / "axe.min.js"
SIZES = ((1440, 900), (820, 1180), (390, 844))
LONGEST_ON_A_PHONE = 4000
# A page is still when its search has ended: 10 s of CPU, on cores that other tests share.
SEARCH_MS = 90_000

# Texts that lie upon each other, in the page and within its charts, and what an edge cuts off.
_OVERLAPS = """
  const overlaps = () => {
    const boxes = [], range = document.createRange(), faults = [];
    const add = (text, box, place) => {
      if (box.width > 1 && box.height > 1)
        boxes.push({text, place, left: box.left, right: box.right, top: box.top,
                    bottom: box.bottom});
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, parent = node.parentElement;
      if (!node.data.trim() || parent.closest(hidden) || !parent.checkVisibility()) continue;
      if (parent.closest("header.top")) continue;  // it stays above what is scrolled
      // A letter of a formula is laid out by its ink; the line of its font is higher.
      const isFormula = parent.closest("math") !== null;
      range.selectNodeContents(node);
      const rects = isFormula ? [parent.getBoundingClientRect()] : range.getClientRects();
      for (const box of rects) add(node.data.trim(), box, parent);
    }
    for (const text of document.querySelectorAll(".chart text")) {
      if (!text.checkVisibility()) continue;
      const box = text.getBoundingClientRect();
      const frame = text.closest(".chart").getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1)
        faults.push(`beyond: ${text.textContent} in ${text.closest(".chart").ariaLabel}`);
    }
    boxes.sort((a, b) => a.top - b.top);
    const deep = 1.5;  // points: what two lines of text may share, for letters do not fill a line
    boxes.forEach((box, place) => {
      for (let next = place + 1; next < boxes.length; next += 1) {
        const other = boxes[next];
        if (other.top >= box.bottom - deep) break;
        const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const high = Math.min(box.bottom, other.bottom) - other.top;
        if (wide > deep && high > deep && box.place !== other.place)
          faults.push(`overlap: ${box.text.slice(0, 60)} AND ${other.text.slice(0, 60)}`);
      }
    });
    return faults;
  };
"""

# Words that are cut in two although no hyphen is there; a word is what no space or <wbr> parts.
# And what lies beyond the right edge, or upon another text.
_FAULTS = (
    """() => {
  const faults = [], range = document.createRange();
  const hidden = ".visually-hidden, .skip, script, style, option, textarea, pre, .narrow thead";
"""
    + _OVERLAPS
    + """
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest(hidden)) continue;
    for (const match of node.data.matchAll(/[^\\s\\-\\/–]+/g)) {
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1)
        faults.push(`broken: ${match[0]}`);
    }
  }
  for (const node of document.querySelectorAll("body *")) {
    const box = node.getBoundingClientRect();
    if (node.closest("details:not([open]) > :not(summary)")) continue;  // it is drawn when opened
    if (node.closest("svg.plot svg[overflow=hidden]")) continue;  // what lies outside is cut off
    if (box.width && box.right > innerWidth + 1 && !node.closest(hidden))
      faults.push(`sticks out: ${node.outerHTML.slice(0, 90)}`);
    const scrolls = /auto|scroll/.test(getComputedStyle(node).overflowX);
    if (scrolls && node.scrollWidth > node.clientWidth + 1 && !node.closest("pre"))
      faults.push(`scrolls sideways: ${node.outerHTML.slice(0, 90)}`);
  }
  faults.push(...overlaps());
  const controls = document.getElementById("controls");  // all choices of a job are in sight
  if (innerWidth > 1020 && controls && controls.scrollHeight > controls.clientHeight)
    faults.push(`choices out of sight: ${controls.scrollHeight - controls.clientHeight}`);
  const name = document.documentElement;
  if (name.scrollWidth > innerWidth) faults.push(`wide: ${name.scrollWidth}`);
  return faults;
}"""
)


def find_faults(page, *, is_whole=False):
    """List what is wrong with a page at three sizes, light and dark: its looks and axe's rules.

    Dark it is looked at on one size alone, and for axe once in each colour, unless `is_whole`.
    """
    faults = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        sizes = SIZES if is_whole or scheme == "light" else SIZES[:1]
        for size in sizes:
            faults += find_faults_of_size(page, *size)
            if is_whole or size == sizes[-1]:
                faults += [(scheme, size[0], *found) for found in find_violations(page)]
    return faults


def find_faults_of_size(page, width, height):
    """List what is wrong with the looks of a page on a screen."""
    page.set_viewport_size({"width": width, "height": height})
    controls = "controls => controls && (controls.open = innerWidth > 1020)"
    page.evaluate(f"({controls})(document.getElementById('controls'))")
    page.wait_for_timeout(150)
    faults = [(width, fault) for fault in page.evaluate(_FAULTS)]
    tall = page.evaluate("document.documentElement.scrollHeight")
    if width == SIZES[-1][0] and tall > LONGEST_ON_A_PHONE:
        faults.append((width, f"{tall} high"))
    return faults


# Pictures and tables of a page that cannot be taken away, as PNG or as CSV and Markdown.
_UNCOPIED = """() => {
  const missing = [], shown = node => node.checkVisibility() && node.getClientRects().length;
  const near = (node, word) => {
    for (let at = node; at && !at.matches("main"); at = at.parentElement) {
      const buttons = [...at.parentElement.querySelectorAll("button.copy:not([hidden])")];
      if (buttons.length)
        return buttons.some(button => button.textContent === word);
    }
    return false;
  };
  for (const node of document.querySelectorAll("main [role=img]"))
    if (shown(node) && !near(node, node.matches(".heat") ? "CSV" : "PNG"))
      missing.push(`picture: ${node.getAttribute("aria-label").slice(0, 80)}`);
  for (const node of document.querySelectorAll("main table"))
    if (node.tBodies[0].rows.length > 1)
      for (const word of ["CSV", "Markdown"])
        if (!near(node, word)) missing.push(`table as ${word}: ${node.innerText.slice(0, 80)}`);
  return missing;
}"""


def find_uncopied(page):
    """List the pictures and tables of a page that no button beside them copies."""
    return page.evaluate(_UNCOPIED)


def show_controls(page):
    """Open the form of the job where a screen has it folded."""
    if not page.locator("#controls").count():
        return  # a page that stands alone
    page.locator("#form > *").first.wait_for(state="attached")
    summary = page.locator("#controls:not([open]) > summary")
    if summary.is_visible():  # pages of runs have no job
        summary.click()


def show_folded(page):
    """Open every panel that a phone has folded into its title, once the page stands."""
    page.wait_for_load_state("networkidle", timeout=SEARCH_MS)
    while page.locator(".unfold:visible").count():
        page.locator(".unfold:visible").first.click()


def find_violations(page):
    """List the rules of axe-core that a page breaks."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    return [(item["id"], item["nodes"][0]["html"][:120]) for item in found["violations"]]


def estimate_json(folder, query, layout):
    """Return what `moewright estimate --json` says of a query."""
    path = folder / "plan.json"
    command = [sys.executable, "-m", "moewright", "estimate", query["model"], "--on", query["on"]]
    command += ["--seq-len", query["seq_len"], "--global-batch", query["global_batch"]]
    command += ["--layout", layout, "--json", str(path)]
    subprocess.run(command, capture_output=True, check=False)
    return json.loads(path.read_text())
