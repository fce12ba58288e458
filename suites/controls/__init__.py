"""Planted faults: subjects that differ from the eager implementation in one small thing and must be caught."""
