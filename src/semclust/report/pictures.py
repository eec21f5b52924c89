"""Thumbnails of many images as a few sheets: grids of tiles, each one PNG or JPEG.

A page with thousands of small files would spend more bytes on their headers than on their pixels.

Shapes: N images, H x W pixels, c channels.
"""

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from semclust.arrays import resize, with_channels

SIDES = (96, 64, 48, 32, 16)  # of a thumbnail; the first that fits the budget
BUDGET = 8_000_000  # bytes of all sheets; a third more as text in the page
SHEET = 1024  # pixels of a sheet's side
LOSSLESS = 1024  # values of a thumbnail up to which a PNG is as small as a JPEG
EDGE = 1  # pixels around a tile that repeat its border: enlarged, it does not show its neighbours
JPEG_BLOCK = 8  # a tile that fills whole blocks does not bleed into the next, while colours have full resolution


@dataclass(frozen=True)
class Sheets:
    """Tiles in reading order, sheet after sheet. ``about`` says where a tile lies."""

    files: list[bytes]
    about: dict[str, Any]


def make_sheets(pixels: np.ndarray, rows: np.ndarray, budget: int = BUDGET) -> Sheets:
    """Thumbnails of the images ``rows`` of ``pixels`` (N x H x W x c, uint8), as large as the budget allows."""
    longest = max(pixels.shape[1:3])
    for side in sorted({min(side, longest) for side in SIDES}, reverse=True):
        sheets = _draw(pixels, rows, side)
        if sum(map(len, sheets.files)) <= budget:
            break
    return sheets


def _draw(pixels: np.ndarray, rows: np.ndarray, side: int) -> Sheets:
    H, W, c = pixels.shape[1:]
    scale = side / max(H, W)
    h, w = max(1, round(H * scale)), max(1, round(W * scale))
    channels = 1 if c < 3 else 3
    lossless = h * w * channels <= LOSSLESS
    cell_h, cell_w = h + 2 * EDGE, w + 2 * EDGE
    if not lossless:
        cell_h, cell_w = _whole_blocks(cell_h), _whole_blocks(cell_w)
    columns, lines = max(1, SHEET // cell_w), max(1, SHEET // cell_h)
    files = []
    for start in range(0, len(rows), columns * lines):
        part = rows[start : start + columns * lines]
        in_order = np.sort(part)  # as they lie on the disk, where the pixels are a mapped file
        tiles = pixels[in_order][np.searchsorted(in_order, part)]
        tiles = resize(with_channels(tiles[..., :1] if c == 2 else tiles, channels), (h, w))
        tiles = np.pad(tiles, ((0, 0), (EDGE, cell_h - h - EDGE), (EDGE, cell_w - w - EDGE), (0, 0)), mode="edge")
        used = math.ceil(len(part) / columns)
        grid = np.zeros((used * columns, cell_h, cell_w, channels), np.uint8)
        grid[: len(part)] = tiles
        grid = grid.reshape(used, columns, cell_h, cell_w, channels).swapaxes(1, 2)
        grid = grid.reshape(used * cell_h, columns * cell_w, channels)
        sheet = Image.fromarray(grid[..., 0] if channels == 1 else grid)
        buffer = io.BytesIO()
        if lossless:
            sheet.save(buffer, "PNG", optimize=True)
        else:
            sheet.save(buffer, "JPEG", quality=82, subsampling=0)  # "optimize" fails on noise, whose JPEG is large
        files.append(buffer.getvalue())
    about = {
        "type": "image/png" if lossless else "image/jpeg",
        "tile": [w, h],
        "cell": [cell_w, cell_h],
        "edge": EDGE,
        "columns": columns,
        "lines": lines,
    }
    return Sheets(files, about)


def _whole_blocks(side: int) -> int:
    return math.ceil(side / JPEG_BLOCK) * JPEG_BLOCK
