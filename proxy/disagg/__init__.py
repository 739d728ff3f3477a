"""Prefill on one pod, decode on another: connectors, and the order of the requests."""
