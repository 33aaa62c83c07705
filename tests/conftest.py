"""Lies here so that pytest puts this folder on the path: tests of several floors share its sample modules."""

from hypothesis import HealthCheck, settings

# How long a drawn example takes says something about what else the machine does.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
