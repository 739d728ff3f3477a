"""kvlane: one OpenAI endpoint in front of a fleet of vLLM pods."""

__version__ = "0.1.0"
