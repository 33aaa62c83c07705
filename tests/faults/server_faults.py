"""What happens to the bucket that copies go to; each tells whether it could be done."""

from __future__ import annotations

import random

from faults.program import Program


def refuse_credentials(program: Program, rng: random.Random) -> bool:
    """Know nobody's credentials."""
    program.find_bucket().refuse()
    return True


def remove_bucket(program: Program, rng: random.Random) -> bool:
    """Have the bucket go away."""
    program.find_bucket().go_away()
    return True


def silence_server(program: Program, rng: random.Random) -> bool:
    """Have the server take connections and answer none."""
    program.find_bucket().fall_silent()
    return True
