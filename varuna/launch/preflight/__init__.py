"""Whether machines are fit for a job, and what to do about it if not."""
