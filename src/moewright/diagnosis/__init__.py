"""Diagnosis of runs: which wall holds a step back, what fixes bring, and predicted = counted."""
