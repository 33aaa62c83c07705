"""Observation: what ran, how long it took, and the records that a run leaves behind."""
