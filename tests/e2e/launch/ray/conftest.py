"""The small policy of the integration tests, for runs under Ray."""

from support.small_policy import policy, recipe, train  # noqa: F401
