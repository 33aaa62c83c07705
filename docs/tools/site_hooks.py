"""What mkdocs does beside Markdown: the chapters of the course, formulas, anchors of the glossary.

Nothing that it makes is kept in the repository: every build computes the chapters anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moewright.view.course.course_pages import (
    add_anchors,
    list_site_pages,
    replace_mathematics,
    replace_pictures,
)
from moewright.view.page import read_asset

_STYLE = "assets/course.css"
_THEME = Path(__file__).with_name("course_site.css")


def on_config(config: Any) -> Any:
    """Add the styles of the course."""
    config["extra_css"].append(_STYLE)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each chapter, and the contents."""
    from mkdocs.structure.files import File  # the tests of this module have no mkdocs

    for path, text in list_site_pages():
        files.append(File.generated(config, path, content=text))
    style = read_asset("course.css")
    assert style is not None
    files.append(File.generated(config, _STYLE, content=style + _THEME.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write formulas as MathML, draw pictures of chapters, and give the glossary its anchors."""
    path = page.file.src_uri
    if path.startswith("learn/"):
        return markdown
    if path == "glossary.md":
        markdown = add_anchors(markdown)
    return replace_pictures(replace_mathematics(markdown))
