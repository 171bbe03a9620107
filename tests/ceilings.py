"""Small sizes for what a run measures of the machine: no test depends on how well it does."""

from magicdec.measure import ceilings

ceilings.MATMUL_ON, ceilings.READ_ON = {"cpu": 128, "cuda": 1024}, {"cpu": 1 << 22, "cuda": 1 << 22}
