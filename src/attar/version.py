"""The version of attar. The build reads it by pattern, so this module imports nothing."""

__version__ = "0.1.0"
