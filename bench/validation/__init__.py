"""The simulated engine compared with a real one: the same requests for both, and the difference of their responses."""
