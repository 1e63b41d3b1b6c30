"""Check of the package on a machine with a GPU: ``python -m benchmarks.gpu_check``."""
