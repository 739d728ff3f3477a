"""kvlane as the endpoint picker of an Envoy-based gateway: the gateway sends the requests, and kvlane chooses the
pods."""
