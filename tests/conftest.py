"""Property tests judge results, not speed: the machine may be busy with engines.

A gate must not depend on luck: the same examples every time. `--hypothesis-profile=search` draws new ones.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("gate", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", settings.get_profile("gate"), derandomize=False, max_examples=500)
settings.load_profile("gate")
