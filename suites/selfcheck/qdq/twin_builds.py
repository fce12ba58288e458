"""Two builds of one name."""

from suites.selfcheck.qdq.broken_builds import GOOD

BUILDS = (GOOD, GOOD)
