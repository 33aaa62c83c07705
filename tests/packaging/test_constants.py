"""Numbers of the package: each says why it is what it is, and units stand in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import moewright

ROOT = Path(moewright.__file__).parent
UNITS = Path("spec/units.py")  # whose names say what they are
# A name of a module, and a value of numbers and operators alone.
NUMBER = re.compile(r"(?P<name>[A-Za-z_]\w*)(: \w+)? = (?=.*\d)[-+*/%<|()~\s.\dxXa-fA-F_]+(#.*)?")


def _list_numbers(place: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the name and line of each number of a module, and whether a comment is beside it.

    That is one on its line, or on a line above it with no blank line between.
    """
    has_comment = False
    for number, line in enumerate((ROOT / place).read_text().splitlines(), 1):
        has_comment = bool(line) and (has_comment or "#" in line)
        if match := NUMBER.fullmatch(line):
            yield match["name"], number, has_comment


PLACES = tuple(path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py")))


def test_each_number_with_a_name_says_why() -> None:
    numbers = [(place, *row) for place in PLACES if place != UNITS for row in _list_numbers(place)]
    assert len(numbers) > 800
    unexplained = [
        f"{place}:{line}: {name}" for place, name, line, is_told in numbers if not is_told
    ]
    assert not unexplained, "say why, beside the line"


def test_units_stand_in_one_module() -> None:
    units = {name for name, _, _ in _list_numbers(UNITS) if not name.startswith("_")}
    assert {"GIB", "HOUR_S", "FP32_BYTES"} <= units
    again = [
        f"{place}:{line}: {name}"
        for place in PLACES
        if place != UNITS
        for name, line, _ in _list_numbers(place)
        if name.lstrip("_") in units
    ]
    assert not again, "import it from spec/units.py"
