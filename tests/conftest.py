"""The same examples everywhere, and as long as they take: what Hypothesis does by itself only where CI is set."""

from hypothesis import settings

settings.load_profile("ci")
