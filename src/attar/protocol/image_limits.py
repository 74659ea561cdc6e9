"""Limits of the images of a request that server, scheduler and engine share. The module needs no package."""

from __future__ import annotations

CHANNELS = 3
MAX_IMAGES = 8  # of a request
MAX_PIXELS = 16_000_000  # of one image, before it is resized
MAX_REQUEST_PIXELS = 32_000_000  # of all images of a request, before and after they are resized
MAX_ROWS = 32_768  # feature rows of one image
MAX_TILE_BYTES = 48 << 20  # of a request: its message fits into a frame
