"""Units."""

GIB = 1 << 30  # bytes
