"""Diagnosis of runs: which wall holds a step back, what a fix would bring, and predicted = counted."""
