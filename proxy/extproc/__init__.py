"""kvlane as the endpoint picker of an Envoy-based gateway: Envoy sends the requests, and kvlane chooses the pods.

In this package "gateway" means that Envoy; elsewhere it means kvlane's data path, `proxy.gateway`."""
