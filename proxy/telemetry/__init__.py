"""Every Prometheus series in one catalogue; logs; the access log; the timing wrapper."""
