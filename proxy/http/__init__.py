"""The rim: what speaks HTTP with clients, pods and operators."""
