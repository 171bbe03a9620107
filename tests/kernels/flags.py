"""A plugin of pytest: kernels are compiled with the flags of KERNEL_FLAGS as well, which win over
the usual ones.
"""

import os

from magicdec.kernels import library

library.FLAGS = (*library.FLAGS, *os.environ["KERNEL_FLAGS"].split())
