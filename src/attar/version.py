"""The version of attar, and the commit that it was built from. The build reads the version by pattern."""

from __future__ import annotations

__version__ = "0.1.0"

COMMIT_FILE = "_commit.txt"
"""The file beside this module that a build writes (`CMakeLists.txt`)."""


def commit() -> str | None:
    """Return the commit that the build recorded, with `-dirty` where files had changed; None in a clone or where a
    source archive was built without git."""
    from importlib.resources import files  # most processes ask for the version alone

    file = files("attar") / COMMIT_FILE
    return (file.read_text().strip() or None) if file.is_file() else None


def described() -> str:
    """Return the version, and the commit where it is known, in one line."""
    known = commit()
    return __version__ if known is None else f"{__version__} ({known})"
