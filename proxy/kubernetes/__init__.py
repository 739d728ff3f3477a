"""Collections of a Kubernetes API server, kept up to date: what is asked, and how a watch is followed."""
