"""QDQ: tensors rounded to a low-precision grid and back, for states and WY activations."""

from kernels.qdq.host import available_conversions, qdq_state, qdq_w

__all__ = ["available_conversions", "qdq_state", "qdq_w"]
