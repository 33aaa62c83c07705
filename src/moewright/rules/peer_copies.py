"""Which copies of the states ranks keep in host memory for each other."""

from __future__ import annotations

# A rank may die while a copy is taken: the one before it is kept meanwhile.
GENERATIONS = 2
# Each generation is a copy of the rank's own state, and one of another rank's.
COPIES = 2 * GENERATIONS
