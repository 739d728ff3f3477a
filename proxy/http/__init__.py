"""HTTP with clients, pods and operators."""
