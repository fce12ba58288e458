"""What this project compiles for every architecture, as a subject of its own: its builds and nothing to run.

qualify run --profile cpu --subject kernels.builds
"""

from __future__ import annotations

BUILDS = ("kernels.qdq.builds", "kernels.gdn.builds")
"""Modules that list the builds of their kernels."""
