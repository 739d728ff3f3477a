"""State shared between proxy processes that place requests on the same pods: loads, prefixes, bindings."""
