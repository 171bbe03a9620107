"""The halves of the published measurements: the model may be changed by one, and is judged on the
other.
"""

from hashlib import sha256


def is_held_back(publisher: str) -> bool:
    """Return whether a source's measurements judge the model, and are not looked at to change it.

    The last bit of the SHA-256 of its name decides. What a name has in brackets, the engine of a
    part of its tables, does not count.
    """
    source = publisher.partition(" (")[0]
    return sha256(source.encode()).digest()[-1] % 2 == 1
