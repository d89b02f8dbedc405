"""A job on Kubernetes: its manifests."""
