"""From a configuration to a scheduler, and from a request to a decision."""
