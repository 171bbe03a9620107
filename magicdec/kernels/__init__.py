"""Kernels: for CPUs in C++, compiled at their first use, and for NVIDIA GPUs in Triton."""
