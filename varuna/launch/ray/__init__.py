"""A job on the nodes of a Ray cluster."""
