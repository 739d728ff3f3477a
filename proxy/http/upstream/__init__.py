"""The way to the pods: a pool of connections for each."""
