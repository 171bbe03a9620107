"""A plugin of pytest: kernels compiled for processors with AVX2, as they would be without AVX-512."""

from magicdec.kernels import library

library.FLAGS = tuple("-march=haswell" if flag == "-march=native" else flag for flag in library.FLAGS)
