"""Telemetry: all Prometheus series in one catalogue, logs, the access log, and the timing wrapper."""
