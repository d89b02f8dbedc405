"""Listens to events; nothing that works calls it."""
