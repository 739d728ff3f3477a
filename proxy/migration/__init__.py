"""Configurations of other routers and gateways as kvlane's own."""
