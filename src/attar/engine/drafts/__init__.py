"""Drafters with weights of their own that an engine loads beside its model: draft models and heads."""
