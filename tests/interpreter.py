"""A plugin of pytest that speeds up Triton's interpreter; test_interpreted.py loads it.

The interpreter replaces the language's functions by its own at every call of a device function.
This plugin does it once for each module.
"""

from triton.runtime import interpreter

replaced_for: set[str] = set()


def call(self, *args, **kwargs):
    if self.fn.__module__ not in replaced_for:
        interpreter._patch_lang(self.fn)
        replaced_for.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = call
