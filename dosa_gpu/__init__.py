"""Triton kernels for DoSA's prefill selection: see ``dosa_gpu.api``. Importing this needs neither a GPU nor Triton."""
