"""The tests run Triton kernels in the interpreter, which must be chosen before any import."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
