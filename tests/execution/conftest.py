"""The small model of the engine's tests."""

from tests.engine.conftest import decoder as decoder
