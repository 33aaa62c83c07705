"""Pages: the studio's shell, single files that open offline, and the colours of both."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from types import MappingProxyType

from moewright.spec.quoting import Html
from moewright.spec.record import Record, replace_non_finite
from moewright.view.course.glossary import list_terms

# In the order in which stacks show them. Middle tones: they stand on white and on near-black.
MEMORY_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#4878b8",
        "gradients": "#4fa3c7",
        "master": "#8467c9",
        "moments": "#b562b8",
        "activations": "#e07b39",
        "logits": "#c39a2b",
        "buffers": "#a0744c",
        "transient": "#cf5050",
        "communication": "#2f9e83",
        "fragmentation": "#8d96a3",
        "host": "#66738a",
    }
)
TIME_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "#4878b8",
        "dense": "#4fa3c7",
        "experts": "#2f9e83",
        "elementwise": "#7fa843",
        "head": "#c39a2b",
        "recompute": "#a0744c",
        "offload": "#7d7f4a",
        "ep_comm": "#e07b39",
        "tp_comm": "#d9558a",
        "cp_comm": "#b562b8",
        "pp_comm": "#cf5050",
        "dp_comm": "#8467c9",
        "bubble": "#8d96a3",
        "host": "#66738a",
        "optimizer": "#4d6296",
    }
)
MODULE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "#7d7f4a",
        "attention": "#4878b8",
        "dense_mlp": "#4fa3c7",
        "router": "#d9558a",
        "experts": "#2f9e83",
        "shared_experts": "#7fa843",
        "norm": "#b562b8",
        "head": "#c39a2b",
        "mtp": "#cf5050",
        "other": "#8d96a3",
    }
)
PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "data": "#7d7f4a",
        "forward": "#4878b8",
        "backward": "#2f9e83",
        "grad_reduce": "#8467c9",
        "optimizer": "#4d6296",
        "param_gather": "#b562b8",
        "other": "#8d96a3",
    }
)
# Rows of a timetable: forward, backward, weight gradients.
ROW_COLOURS: Mapping[str, str] = MappingProxyType({"F": "#4878b8", "B": "#2f9e83", "W": "#c39a2b"})


def build_palette() -> dict[str, dict[str, str]]:
    """Return every colour by kind and name, as pages take them."""
    return {
        "memory": dict(MEMORY_COLOURS),
        "time": dict(TIME_COLOURS),
        "module": dict(MODULE_COLOURS),
        "phase": dict(PHASE_COLOURS),
        "row": dict(ROW_COLOURS),
    }


_SCRIPTS = (
    "basics.js",
    "charts.js",
    "document.js",
    "plan.js",
    "search.js",
    "timetable.js",
    "trace.js",
    "run.js",
)
_SHELL_SCRIPT = "shell.js"  # all that the studio's page runs
PAGES = (  # that scripts fill
    ("plan", "Plan"),
    ("top", "Top plans"),
    ("timetable", "Timetable"),
    ("compare", "Compare"),
    ("budget", "Budget"),
    ("design", "Design"),
    ("runs", "Runs"),
    ("watch", "Watch"),
    ("share", "Share"),
)
_COURSE = ("learn", "Learn")  # whose pages its server writes
_HEAD = Html.write("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A file that pages need; `digest` changes with its content, and stands in its address."""

    content: bytes
    digest: str


@cache
def load_assets() -> Mapping[str, Asset]:
    """Return the files that pages need by name, as they are when this is first called."""
    folder = resources.files("moewright.view").joinpath("assets")
    contents = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
    # One file: of sixteen, a browser's work to ask for them is more than to compile them.
    scripts = (*_SCRIPTS, *_list_studio_scripts(contents))
    contents[_SHELL_SCRIPT] = b"\n".join(contents[name] for name in scripts)
    return MappingProxyType(
        {
            name: Asset(content=content, digest=sha256(content).hexdigest()[:16])
            for name, content in contents.items()
        }
    )


def _address(name: str) -> str:
    """Return the address of a file: browsers keep what it leads to for good."""
    return f"/assets/{name}?{load_assets()[name].digest}"


def _read_text(name: str) -> str:
    return load_assets()[name].content.decode()


def render_shell() -> Html:
    """Return the studio's page, which asks its server for all that it shows."""
    return Html.write(
        """{}<title>moewright studio</title>
<link rel="icon" href="{}">
<link rel="stylesheet" href="{}">
<script src="{}" defer></script>
<script type="application/json" id="palette">{}</script>
</head>
<body>
<a class="skip" href="#content">To the answer</a>
{}
<div class="frame">
<aside aria-label="Job and layout"><details id="controls" class="panel" open>
<summary>Job and layout</summary>
<div id="form"></div></details></aside>
<main id="content" tabindex="-1"></main>
</div>
</body>
</html>
""",
        _HEAD,
        *map(_address, ("mark.svg", "style.css", _SHELL_SCRIPT)),
        Html.embed(build_palette()),
        _render_header(),
    )


def _render_header(page: str = "") -> Html:
    """Return the studio's header; `page` is the one that it stands on, "" where a script tells."""
    links = Html.concat(
        Html.write(
            '<a href="/{}" data-page="{}"{}>{}</a>',
            *("" if name == "plan" else name, name),
            Html.mention(' aria-current="page"', name == page),
            title,
        )
        for name, title in (*PAGES, _COURSE)
    )
    return Html.write(
        '<header class="top"><a class="brand" href="/" data-page="plan">{}moewright</a>\n'
        '<nav aria-label="pages">{}</nav></header>',
        _draw_mark(),
        links,
    )


def _draw_mark() -> Html:
    """Return the mark: two of four experts at work."""
    drawing = _read_text("mark.svg")
    return Html.trust(drawing.replace("<svg ", '<svg class="mark" aria-hidden="true" ', 1))


def render_course_page(title: str, body: Html) -> Html:
    """Return a page of the course, which its server has written."""
    return Html.write(
        """{}<title>{} · moewright</title>
<link rel="icon" href="{}">
<link rel="stylesheet" href="{}">
<link rel="stylesheet" href="{}">
<script src="{}" defer></script>
<script src="{}" defer></script>
</head>
<body>
<a class="skip" href="#content">To the text</a>
{}
<main id="content" class="course" tabindex="-1">{}</main>
</body>
</html>
""",
        *(_HEAD, title),
        *map(_address, ("mark.svg", "style.css", "course.css", "basics.js", "course.js")),
        *(_render_header("learn"), body),
    )


def _list_studio_scripts(names: Iterable[str]) -> list[str]:
    """Return the scripts of the studio's own pages, the first of which the others extend."""
    return sorted(
        (name for name in names if name.startswith("studio")), key=lambda name: (len(name), name)
    )


def render_page(records: tuple[Record, ...], title: str) -> Html:
    """Return one file with records, styles and scripts inside; its policy forbids any request."""
    data = [{"kind": type(record).__name__, **record.to_dict()} for record in records]
    scripts = [_read_text(name) for name in (*_SCRIPTS, "offline.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    )
    body = (Html.write("<script>{}</script>", Html.trust(script)) for script in scripts)
    return Html.write(
        """{}<meta http-equiv="Content-Security-Policy" content="{}">
<title>{}</title>
<link rel="icon" href="data:image/svg+xml;base64,{}">
<style>
{}</style>
<script type="application/json" id="palette">{}</script>
<script type="application/json" id="records">{}</script>
<script type="application/json" id="terms">{}</script>
</head>
<body>
<header class="top"><span class="brand">{}moewright</span></header>
<div class="frame wide"><main id="content"></main></div>
{}
</body>
</html>
""",
        _HEAD,
        Html.trust(policy),
        title,
        b64encode(_read_text("mark.svg").encode()).decode(),
        Html.trust(_read_text("style.css")),
        Html.embed(build_palette()),
        Html.embed(replace_non_finite(data)),
        Html.embed(list_terms()),
        _draw_mark(),
        Html.concat(body, "\n"),
    )


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
