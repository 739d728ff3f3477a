"""The headers that the plugins of all pools read."""

from pathlib import Path

from proxy.app import App
from proxy.config.load import load
from proxy.serving import session_headers

CONFIG = Path(__file__).parents[2] / "config"


def test_the_headers_of_agents_equal_those_of_their_plugin() -> None:
    agents, minimal = (App(load(CONFIG / f"{name}.yaml", {})).schedulings.values() for name in ("agents", "minimal"))
    assert session_headers(agents)[:2] == ("x-my-agent-session", "x-claude-code-session-id")
    assert session_headers(minimal) == ()
