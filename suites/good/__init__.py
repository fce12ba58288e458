"""Correct implementations that compute differently from the eager one and must qualify."""
