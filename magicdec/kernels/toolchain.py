"""The check for a C compiler and Python's headers: Triton compiles a C program before it first
launches a kernel.

Slim images have neither. Code that chooses Triton, or torch.compile on a GPU, checks this first.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from importlib.util import find_spec

NEEDS_C = "needs a C compiler and Python's headers"
PROGRAM = "#include <dlfcn.h>\n#include <stdlib.h>\n#include <Python.h>\n"


@cache
def triton_obstacle() -> str | None:
    """Return why Triton cannot launch kernels here, as the words that follow its name; None if it
    can.
    """
    if find_spec("triton") is None:
        return "is not installed; install it: pip install -e '.[triton]'"
    command = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if command is None:
        return (
            f"{NEEDS_C}, and neither gcc nor clang is installed (apt install gcc python3-dev; CC"
            " names another)"
        )
    # As Triton, for Debian's Python.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = sysconfig.get_path("include", scheme)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            command,
            "-x",
            "c",
            "-",
            "-shared",
            "-fPIC",
            f"-I{include}",
            "-o",
            f"{folder}/program.so",
        ]
        try:
            subprocess.run(arguments, input=PROGRAM, capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            reason = next(
                (line for line in error.stderr.splitlines() if "error" in line),
                f"code {error.returncode}",
            )
        except OSError as error:
            reason = error.strerror
        else:
            return None
    return f"{NEEDS_C}, and {command} failed: {reason} (apt install gcc python3-dev)"
