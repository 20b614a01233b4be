"""Triton kernels of the runtime; importing them needs Triton, which nothing else of the package does."""
