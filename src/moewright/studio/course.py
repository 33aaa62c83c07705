"""The course in the studio: its contents, its chapters, and what a move of a control changes."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from moewright.spec.errors import BadInput
from moewright.view.course.chapter import list_chapters, load_chapter
from moewright.view.course.course_pages import (
    write_article,
    write_contents,
    write_glossary,
    write_refusal,
)
from moewright.view.course.lesson import open_lesson
from moewright.view.page import render_course_page


def open_chapters() -> None:
    """Estimate the job of every chapter, so that the first reader of one finds its tables read."""
    for name in list_chapters():
        write_article(open_lesson(load_chapter(name), {}))


async def show_contents(_: Request) -> Response:
    """Send the list of chapters."""
    return HTMLResponse(render_course_page("Learn", await run_in_threadpool(write_contents)))


async def show_glossary(_: Request) -> Response:
    """Send the glossary."""
    return HTMLResponse(render_course_page("Glossary", await run_in_threadpool(write_glossary)))


async def show_chapter(request: Request) -> Response:
    """Send a chapter in the state that the address has."""
    return await run_in_threadpool(_render_chapter, request)


async def send_lesson(request: Request) -> Response:
    """Send the article of a chapter in another state, or why there is none."""
    return await run_in_threadpool(_render_article, request)


def _render_chapter(request: Request) -> Response:
    try:
        chapter = load_chapter(request.path_params["chapter"])
        lesson = open_lesson(chapter, dict(request.query_params))
        body = render_course_page(chapter.title, write_article(lesson))
    except BadInput as error:
        body = render_course_page("Learn", write_refusal(error.reasons))
        return HTMLResponse(body, status_code=404)
    return HTMLResponse(body)


def _render_article(request: Request) -> Response:
    try:
        chapter = load_chapter(request.path_params["chapter"])
        return HTMLResponse(write_article(open_lesson(chapter, dict(request.query_params))))
    except BadInput as error:
        return HTMLResponse(write_refusal(error.reasons))
