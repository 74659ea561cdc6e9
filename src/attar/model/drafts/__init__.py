"""Draft heads as the engine runs them: Medusa heads, EAGLE and EAGLE-3 heads, and early exits, each one file."""
