"""The figures of chapters: names of quantities, and arithmetic with them.

An expression is Python's arithmetic over names such as `peak`, `memory.experts` or `layout.ep`.
`at("key=value, ...", expression)` is its value under other settings. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.view.course.inline import ComputedFigure
from moewright.view.course.job_figures import JOB_FIGURES
from moewright.view.course.lesson import Lesson
from moewright.view.course.pipeline_pictures import PIPELINE_FIGURES
from moewright.view.course.quantity import Quantity, Unit
from moewright.view.course.route_pictures import ROUTE_FIGURES
from moewright.view.course.step_pictures import STEP_FIGURES

# name or name.part -> the quantity; the part is "" where there is none.
NAMES: Mapping[str, Callable[[Lesson, str], Quantity]] = MappingProxyType(
    {**JOB_FIGURES, **PIPELINE_FIGURES, **STEP_FIGURES, **ROUTE_FIGURES}
)
_FUNCTIONS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max, "sqrt": math.sqrt}
)


def compute_figure(lesson: Lesson, figure: ComputedFigure) -> Quantity:
    """Return the value of a figure in a lesson.

    Raises:
        BadInput: it asks for what does not exist, or the job under its settings is not legal.
    """
    try:
        tree = ast.parse(figure.expression, mode="eval")
    except SyntaxError as error:
        raise _refuse(lesson, figure.expression, "is no arithmetic") from error
    value = _evaluate(lesson, tree.body)
    if not figure.unit:
        return value
    if figure.unit not in set(Unit):
        rule = f"a unit is one of {', '.join(Unit)}"
        raise _refuse(lesson, f"{figure.expression} : {figure.unit}", rule)
    return Quantity(number=value.number, unit=Unit(figure.unit), word=value.word)


def _evaluate(lesson: Lesson, node: ast.expr) -> Quantity:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Quantity(number=number, unit=Unit.NUMBER)
        case ast.Name(id=name):
            return _look_up(lesson, name, "")
        case ast.Attribute(value=ast.Name(id=name), attr=part):
            return _look_up(lesson, name, part)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(lesson, operand)
            return Quantity(number=-value.number, unit=value.unit)
        case ast.BinOp(left=left, op=operator, right=right):
            return _combine(lesson, operator, _evaluate(lesson, left), _evaluate(lesson, right))
        case ast.Call(func=ast.Name(id="at"), args=[ast.Constant(value=str() as text), expression]):
            return _evaluate(lesson.change(read_settings(text)), expression)
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
            values = [_evaluate(lesson, argument) for argument in arguments]
            number = _FUNCTIONS[name](*(value.number for value in values))
            return Quantity(number=number, unit=values[0].unit)
    raise _refuse(lesson, ast.unparse(node), "is no arithmetic over names of figures")


def read_settings(text: str) -> dict[str, str]:
    """Return key=value pairs between commas.

    Raises:
        BadInput: a part has no "=".
    """
    settings = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise BadInput(Reason(field="chapter", value=part, rule="a setting is key=value"))
        settings[key.strip()] = value.strip()
    return settings


def _combine(lesson: Lesson, operator: ast.operator, left: Quantity, right: Quantity) -> Quantity:
    match operator:
        case ast.Add():
            return left.plus(right, 1)
        case ast.Sub():
            return left.plus(right, -1)
        case ast.Mult():
            return left.times(right)
        case ast.Div():
            if not right.number:
                raise _refuse(lesson, "/", "divides by zero under these settings")
            return left.over(right)
    raise _refuse(lesson, type(operator).__name__, "arithmetic has + - * / alone")


def _look_up(lesson: Lesson, name: str, part: str) -> Quantity:
    function = NAMES.get(name)
    if function is None:
        raise _refuse(lesson, name, "no figure has this name", closest_match(name, NAMES) or "")
    return function(lesson, part)


def _refuse(lesson: Lesson, value: str, rule: str, nearest: str = "") -> BadInput:
    field = f"chapter {lesson.chapter.name}"
    return BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))
