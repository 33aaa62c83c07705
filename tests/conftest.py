"""Lies here so that pytest puts this folder on the path: tests of several floors share its sample modules."""

from hypothesis import HealthCheck, settings

# The same examples for the same tree: a failure is of the change. How long one takes says what else the machine does.
settings.register_profile("unhurried", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
