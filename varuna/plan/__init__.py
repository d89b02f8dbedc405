"""Sections and machines to a Plan; schedules. Never imports torch."""
