"""Triton kernels for DoSA's prefill selection. Importing this package needs neither a GPU nor Triton; see ``dosa_gpu.api``."""
