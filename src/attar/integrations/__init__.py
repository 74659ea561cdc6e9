"""Integrations with other serving systems: leaf packages that only `cli` imports.

Each package knows one system and imports `protocol`, `routing` and lower packages.
"""
