"""HTTP servers and clients for clients, pods and operators."""
