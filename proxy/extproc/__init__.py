"""kvlane as the endpoint picker of an Envoy-based gateway, which sends the requests and asks where they go."""
