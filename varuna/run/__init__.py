"""One step of a Plan."""
