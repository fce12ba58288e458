"""Checks: what is asked of a case. Each returns comparisons; none asserts or prints."""
