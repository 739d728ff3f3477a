"""The simulated engine beside a real one: the same requests for both, and how far apart their answers come."""
