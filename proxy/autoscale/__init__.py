"""How many replicas each role should have."""
