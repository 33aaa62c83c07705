"""Settings of every test.

This file lies here so that pytest puts this folder on the path: tests of several floors share its
sample modules.
"""

from __future__ import annotations

import os
import shutil

from hypothesis import HealthCheck, settings

# The same tree gives the same examples, so a failure comes from the change. There is no deadline:
# the time of an example depends on what else the machine does.
settings.register_profile(
    "unhurried", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

# Without a GPU Triton's kernels run in its interpreter: the variable must be set before Triton is
# first imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
