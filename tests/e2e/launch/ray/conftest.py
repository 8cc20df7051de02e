"""The small policy of the integration tests, for runs under Ray.

Ray reads its environment at its import, so `ray_runs` sets it before a test module imports Ray.
"""

import support.ray_runs  # noqa: F401
from support.small_policy import policy, recipe, train  # noqa: F401
