"""The trainer: runs a Plan on torch, counts what ran, and never imports a planner."""
