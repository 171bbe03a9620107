"""A plugin of pytest that makes Triton's interpreter faster, which test_interpreted.py runs.

At each call of a device function, the interpreter replaces the language's functions by its own, as the kernel's call
has done before. For the device functions of a module, once is enough.
"""

from triton.runtime import interpreter

replaced_for: set[str] = set()


def call(self, *args, **kwargs):
    if self.fn.__module__ not in replaced_for:
        interpreter._patch_lang(self.fn)
        replaced_for.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = call
