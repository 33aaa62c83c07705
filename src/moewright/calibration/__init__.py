"""Measured runs: reading tables of them, scoring the planner on them, fitting constants to them."""
