"""Prefill on one pod, decode on another: what each engine's connector wants of the two requests. No I/O."""
