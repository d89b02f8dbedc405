"""Who is in, and what to do when that changes: notices, liveness, membership. Never imports torch."""
