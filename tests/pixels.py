"""What a picture shows, by its pixels: the share that is not background, and where the pixels of a
colour are.
"""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops
from scipy import ndimage

TOLERANCE = 12  # of each channel: edges are blended


def opened(picture: bytes | Path) -> Image.Image:
    source = io.BytesIO(picture) if isinstance(picture, bytes) else picture
    return Image.open(source).convert("RGB")


def ink(picture: bytes | Path) -> float:
    """Return the share of pixels that differ from the picture's corner."""
    pixels = np.asarray(opened(picture)).astype(np.int16)
    return float((abs(pixels - pixels[0, 0]) > TOLERANCE).any(-1).mean())


def coloured(picture: bytes | Path) -> float:
    """Return the share of pixels that have a hue. Marks have one; axes and texts are grey."""
    red, green, blue = np.moveaxis(np.asarray(opened(picture)), -1, 0)
    most = np.maximum(np.maximum(red, green), blue)
    least = np.minimum(np.minimum(red, green), blue)
    return float((most - least > 3 * TOLERANCE).mean())


def spots(picture: bytes | Path, colour: str, least: int = 30) -> list[tuple[float, float]]:
    """Return the centres (x, y) of the connected spots of a colour, from left to right."""
    wanted = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)])
    mask = abs(np.asarray(opened(picture)).astype(int) - wanted).max(-1) <= TOLERANCE
    labels, number = ndimage.label(mask)
    large = [label for label in range(1, number + 1) if (labels == label).sum() >= least]
    return sorted((x, y) for y, x in ndimage.center_of_mass(mask, labels, large))


def changed(before: bytes | Path, after: bytes | Path) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) of the pixels in which two pictures of one size
    differ.
    """
    box = ImageChops.difference(opened(before), opened(after)).getbbox()
    assert box is not None, "the same picture"
    return box
