"""No chapter has a figure of its own: what moves the planner's answer to its job moves its text."""

import functools
import importlib
import os
import pkgutil
import random
import sys
from dataclasses import fields, replace
from datetime import date

import pytest

import moewright.cost
import moewright.rules
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.units import Sourced, format_bytes, format_seconds
from moewright.view.course.chapter import list_chapters, load_chapter
from moewright.view.course.lesson import open_lesson
from moewright.view.course.lesson_html import LessonWriter, ReadingPlace

_MOVED = 0.02  # of a figure: three digits show it
_DRAWS = 4


def list_constants():
    """Return the module and the name of every number that rules and costs are written with."""
    constants = []
    for package in (moewright.rules, moewright.cost):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            constants += [
                (module, name)
                for name, value in vars(module).items()
                if name.isupper() and type(value) in (int, float) and value
            ]
    return constants


@functools.cache
def list_caches():
    """Return the caches between a constant and the text of a chapter."""
    layers = ("moewright.rules", "moewright.cost", "moewright.search", "moewright.view.course")
    kept = {"load_chapter", "load_glossary", "_index_words", "load_questions"}  # texts
    return [
        value
        for name, module in sorted(sys.modules.items())
        if name.startswith(layers)
        for key, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper) and key not in kept
    ]


def read_world(chapter):
    """Return the figures of a chapter's job that it shows, and its text with its answers."""
    for cache in list_caches():
        cache.cache_clear()
    lesson = open_lesson(chapter, {})
    estimate = lesson.plan.estimate
    blocks = LessonWriter(lesson=lesson, place=ReadingPlace.STUDIO).write_blocks()
    text = "".join(blocks)
    figures = (estimate.step_s, float(estimate.peak_bytes))
    words = (format_seconds(estimate.step_s), format_bytes(estimate.peak_bytes))
    shown = [word in text for word in words]
    return figures, shown, text


def assert_follows(name, before, chapter):
    """Assert that a text is another one, where a figure that it shows has moved visibly."""
    then, shown, text = before
    try:
        figures, _, now = read_world(chapter)
    except (BadInput, ValueError, ZeroDivisionError):
        return False  # under this constant the planner refuses the job: the course is not built
    moves = [abs(new / old - 1) for new, old in zip(figures, then, strict=True)]
    if not any(move > _MOVED and is_shown for move, is_shown in zip(moves, shown, strict=True)):
        return False
    assert now != text, f"{chapter.name} does not follow {name}, which moves its job by {moves}"
    return True


@pytest.fixture
def fresh():
    """Leave no answer of a changed world behind."""
    yield
    for cache in list_caches():
        cache.cache_clear()


@pytest.mark.thorough
@pytest.mark.parametrize("name", list_chapters())
def test_every_constant_that_moves_a_job_moves_its_chapter(name, monkeypatch, fresh):
    chapter = load_chapter(name)
    before = read_world(chapter)
    constants = list_constants()
    assert len(constants) > 20
    for module, constant in constants:
        change_constant(module, constant, chapter, before, monkeypatch)


def change_constant(module, constant, chapter, before, monkeypatch):
    """Raise a constant by half wherever its module's value was imported; whether it is followed."""
    value = getattr(module, constant)
    changed = type(value)(value * 1.5)
    with monkeypatch.context() as world:
        for other, _ in [(module, constant), *list_constants()]:
            if vars(other).get(constant) is value:
                world.setattr(other, constant, changed)
        return assert_follows(f"{module.__name__}.{constant}", before, chapter)


def list_figures(hardware):
    """Return what is measured, fitted or stated of a hardware as number, each by its place."""
    places = [
        (part, field.name)
        for part in ("device", "fabric")
        for field in fields(getattr(hardware, part))
        if isinstance(getattr(getattr(hardware, part), field.name), Sourced)
    ]
    return [*places, *(("constants", constant.name) for constant in hardware.constants)]


def raise_figure(hardware, part, name):
    """Return a hardware with one figure half as large again."""

    def grow(sourced):
        return replace(sourced, value=type(sourced.value)(sourced.value * 1.5))

    held = getattr(hardware, part)
    if part != "constants":
        return replace(hardware, **{part: replace(held, **{name: grow(getattr(held, name))})})
    return replace(
        hardware,
        constants=tuple(
            replace(constant, value=grow(constant.value)) if constant.name == name else constant
            for constant in held
        ),
    )


def test_chapters_follow_the_figures_of_their_device(monkeypatch, fresh):
    """The host's time, which every step has, and some others, drawn by the day."""
    read = catalogue.hardware
    day = os.environ.get("DRAWS_OF") or date.today().isoformat()
    followers = set()
    for name in list_chapters():
        chapter = load_chapter(name)
        before = read_world(chapter)
        places = list_figures(read(f"{chapter.settings['devices']}x{chapter.settings['device']}"))
        draws = random.Random(f"{day} {name}").sample(places, _DRAWS)
        for place in (("constants", "host_s_per_layer_microbatch"), *draws):
            with monkeypatch.context() as world:
                world.setattr(
                    catalogue, "hardware", lambda text, at=place: raise_figure(read(text), *at)
                )
                if assert_follows(".".join(place), before, chapter):
                    followers.add(name)
    assert len(followers) >= 4
