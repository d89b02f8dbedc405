"""Measurements that a person runs with ``make bench``; README.md says what each one shows."""
