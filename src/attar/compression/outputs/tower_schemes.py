"""Schemes of a vision tower, by name. Torch-free."""

from __future__ import annotations

UNCHANGED = "16bit"
TOWER_SCHEMES = (UNCHANGED, "w8", "w8a8")
"""What `--vision` takes."""
