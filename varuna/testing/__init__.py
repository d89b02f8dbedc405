"""For users' own tests: emulated stages, tiny models."""
