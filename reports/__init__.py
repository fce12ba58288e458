"""A receipt turned into a page, a comparison, a summary, a verification. Needs no torch."""
