"""The time of a step: rows of work, collectives, layers, and the pipeline."""
