"""Expectation of a `UserError` by its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attar.errors import Code, UserError


@contextmanager
def user_error(code: Code | str, *names: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a `UserError` of this code, whose sentence holds all `names`: of layers, files and numbers, no phrases."""
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}, not {code}: {error}"
    for name in names:
        assert name in str(error), f"{name!r} is not in {str(error)!r}"
