from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples in every run, and what fails is printed so that it can be run again.
settings.register_profile(
    "kvtier",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvtier"))
