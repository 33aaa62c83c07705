"""A lesson: a chapter with the steps that its reader chose, and the job that follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlencode

from moewright.codec import parse_layout
from moewright.codec.layout_text import LAYOUT_KEYS
from moewright.cost.memory.estimate_memory import refuse_illegal_job
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan
from moewright.spec.units import mention
from moewright.spec.workload import Dtype, Workload
from moewright.view.course.chapter import Chapter, ChapterControl, ControlStep

# What settings may say beside keys of the layout.
_JOB_KEYS = ("model", "layers", "device", "devices")
_WORKLOAD_KEYS = ("seq_len", "global_batch", "precision", "load_factor")
_SCENE_KEYS = ("token", "layer", "balance")  # of pictures alone
SETTING_KEYS = frozenset((*_JOB_KEYS, *_WORKLOAD_KEYS, *_SCENE_KEYS, *LAYOUT_KEYS))
_KEPT_PLANS = 256


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A chapter and its state: a value for each setting; a record that does not change."""

    chapter: Chapter
    settings: Mapping[str, str]

    @cached_property
    def plan(self) -> Plan:
        """The job with its estimate.

        Raises:
            BadInput: the settings are no legal job.
        """
        return _plan_settings(self._job_settings)

    @property
    def job(self) -> Job:
        """The job alone, which takes a hundredth of an estimate's time.

        Raises:
            BadInput: the settings are no legal job.
        """
        return _read_job(self._job_settings)[0]

    @property
    def _job_settings(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(item for item in self.settings.items() if item[0] not in _SCENE_KEYS))

    def change(self, settings: Mapping[str, str]) -> Lesson:
        """Return the lesson with other values of some settings.

        Raises:
            BadInput: there is no such setting.
        """
        for key in settings:
            if key not in SETTING_KEYS:
                raise BadInput(Reason(field=key, rule="is no setting of a job or a picture"))
        return Lesson(chapter=self.chapter, settings={**self.settings, **settings})

    def chosen_step(self, control: ChapterControl) -> ControlStep:
        """Return the step of a control whose settings are the lesson's."""
        for step in control.steps:
            if all(self.settings.get(key) == value for key, value in step.settings.items()):
                return step
        rule = f"the chapter's own settings are no step of {control.label}"
        raise BadInput(Reason(field=f"chapter {self.chapter.name}", value=control.key, rule=rule))

    @property
    def address(self) -> str:
        """The query of the studio's pages that show the lesson's job."""
        plan = self.plan
        workload = plan.workload
        query = {
            "model": _name_model(self.settings),
            "on": f"{plan.hardware.count}x{self.settings['device']}",
            "seq_len": workload.seq_len,
            "global_batch": workload.global_batch,
            "precision": workload.precision.value,
            "layout": format_settings(self.settings),
        }
        return urlencode(query)


def open_lesson(chapter: Chapter, choices: Mapping[str, str]) -> Lesson:
    """Return a chapter under the choices of an address: a step's label for each control's key.

    Raises:
        BadInput: a control or a step does not exist.
    """
    lesson = Lesson(chapter=chapter, settings=chapter.settings)
    for key, label in choices.items():
        control = chapter.control(key)
        step = next((step for step in control.steps if step.label == label), None)
        if step is None:
            labels = [step.label for step in control.steps]
            rule = f"{control.label} takes {'; '.join(labels)}"
            raise BadInput(Reason(field=key, value=label[:40], rule=rule, nearest=labels[0]))
        lesson = lesson.change(step.settings)
    return lesson


def format_settings(settings: Mapping[str, str]) -> str:
    """Return the layout text of settings."""
    return ",".join(_format_keys(settings))


def _format_keys(settings: Mapping[str, str]) -> Iterator[str]:
    for key in LAYOUT_KEYS:
        value = settings.get(key, "")
        if value and value != "none":
            yield f"{key}={value}"


def _name_model(settings: Mapping[str, str]) -> str:
    """Return the name of the model, cut where the settings say so, as the catalogue reads it."""
    return settings["model"] + mention(" ({} layers)", settings.get("layers"))


@lru_cache(maxsize=_KEPT_PLANS)
def _plan_settings(items: tuple[tuple[str, str], ...]) -> Plan:
    job, hardware = _read_job(items)
    return build_plan(job.model, job.workload, hardware, job.layout)


@lru_cache(maxsize=_KEPT_PLANS)
def _read_job(items: tuple[tuple[str, str], ...]) -> tuple[Job, Hardware]:
    settings = dict(items)
    model = catalogue.model(_name_model(settings))
    hardware = catalogue.hardware(f"{settings['devices']}x{settings['device']}")
    values: dict[str, Any] = {
        "seq_len": int(settings["seq_len"]),
        "global_batch": int(settings["global_batch"]),
        "precision": Dtype(settings.get("precision", "bf16")),
    }
    if settings.get("load_factor", "none") != "none":
        values["load_factor"] = float(settings["load_factor"])
    layout = parse_layout(format_settings(settings), world_size=hardware.count)
    job = Job(model=model, workload=Workload(**values), layout=layout)
    refuse_illegal_job(job, hardware)
    return job, hardware
