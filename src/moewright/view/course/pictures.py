"""The pictures of chapters by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.view.course import (
    grid_pictures,
    pipeline_pictures,
    route_pictures,
    step_pictures,
)
from moewright.view.course.drawing import CoursePicture
from moewright.view.course.lesson import Lesson

PICTURES: Mapping[str, Callable[[Lesson], CoursePicture]] = MappingProxyType(
    {
        "device": pipeline_pictures.draw_device,
        "kept": pipeline_pictures.draw_kept,
        "recompute": pipeline_pictures.draw_recompute,
        "dense_shards": grid_pictures.draw_dense_shards,
        "dense_groups": grid_pictures.draw_dense_groups,
        "expert_shards": grid_pictures.draw_expert_shards,
        "all_groups": grid_pictures.draw_all_groups,
        "timetable": pipeline_pictures.draw_timetable,
        "router": route_pictures.draw_router,
        "dispatch": route_pictures.draw_dispatch,
        "combine": route_pictures.draw_combine,
        "expert_loads": route_pictures.draw_expert_loads,
        "load_cost": route_pictures.draw_load_cost,
        "step": step_pictures.draw_step,
        "walls": step_pictures.draw_walls,
        "roofline": step_pictures.draw_roofline,
        "schedules": pipeline_pictures.draw_schedules,
    }
)


def draw_picture(lesson: Lesson, name: str) -> CoursePicture:
    """Return a picture of a lesson.

    Raises:
        BadInput: there is none of the name, or the job is not legal.
    """
    draw = PICTURES.get(name)
    if draw is None:
        near = closest_match(name, PICTURES) or ""
        field = f"chapter {lesson.chapter.name}"
        raise BadInput(Reason(field=field, value=name, rule="no such picture", nearest=near))
    return draw(lesson)
