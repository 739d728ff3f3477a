"""Ways to scale a fleet with two roles, to compare kvlane's with."""
