"""Planted faults: the eager implementation with one small thing wrong, which a qualification must notice."""
