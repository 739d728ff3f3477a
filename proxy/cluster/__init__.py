"""State shared between processes that place requests on the same pods: loads, prefixes, bindings."""
