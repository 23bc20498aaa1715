"""A slow machine is no finding: hypothesis would fail a test for how long an example took."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "at any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("at any speed")
