"""KV events of engines, over ZeroMQ: heard in order, asked for again where some were missed."""
