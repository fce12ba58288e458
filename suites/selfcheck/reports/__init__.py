"""Checks of the receipt: its bytes, its page, its verification."""
