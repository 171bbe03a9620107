"""Kernels for CPUs in C++, compiled at their first use, and PyTorch's operators that they stand in for."""
