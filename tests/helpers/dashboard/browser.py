"""A real Chromium without a window, asked from tests that have an event loop to keep turning."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.helpers.waiting import PATIENCE

T = TypeVar("T")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium: apt-get install chromium chromium-driver"
)

ROOT = Path(__file__).parents[3]
AXE = Path(os.environ.get("KVLANE_AXE", ROOT / ".venv/axe/node_modules/axe-core/axe.min.js"))

needs_axe = pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: install npm, then: make axe")

POLL_INTERVAL = 0.03

# Sets `clickHit` to whether the next click reaches the element; a page that the click opens has no `clickHit`.
WATCH_CLICK = """
window.clickHit = false;
const watch = (event) => { window.clickHit = arguments[0].contains(event.target); };
document.addEventListener("click", watch, { capture: true, once: true });
"""


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # Without a sandbox, which root may not have; without /dev/shm, which is small in containers.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@dataclass(frozen=True, slots=True)
class Page:
    """What a person does with the page; conditions come true within ten seconds, or it fails."""

    driver: webdriver.Chrome

    async def open(self, url: str, media: Mapping[str, str] | None = None, width: int = 1400) -> None:
        """As a page that was never seen before."""
        features = [{"name": name, "value": value} for name, value in (media or {}).items()]
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 700}
        await self._do(self.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": features})
        await self._do(self.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", metrics)
        await self._do(self.driver.get_log, "browser")
        await self._do(self.driver.get, url)

    async def ask(self, script: str, *arguments: object) -> Any:
        return await self._do(self.driver.execute_script, f"return {script}", *arguments)

    async def until(self, script: str, *arguments: object) -> Any:
        """Until this is true, or something that is; then what it is."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not (found := await self.ask(script, *arguments)):
                    await asyncio.sleep(POLL_INTERVAL)
                return found
        except TimeoutError:
            raise AssertionError(f"{script} did not come true; the page:\n{await self.text('body')}") from None

    async def says(self, css: str, words: str) -> None:
        await self.until("document.querySelector(arguments[0])?.innerText.includes(arguments[1])", css, words)

    async def text(self, css: str) -> str:
        return str(await self.ask("document.querySelector(arguments[0])?.innerText", css))

    async def click(self, css: str) -> None:
        await self._do(lambda: self._act(css, self._click))

    async def write(self, css: str, text: str) -> None:
        """In place of what stands there."""

        def replace(element: WebElement) -> None:
            element.clear()
            element.send_keys(text)

        await self._do(lambda: self._act(css, replace))

    async def press(self, *keys: str) -> None:
        """Where the focus is."""
        await self._do(lambda: webdriver.ActionChains(self.driver).send_keys(*keys).perform())

    async def focus(self) -> str:
        """The name of what has it."""
        return str(await self.ask("document.activeElement.ariaLabel ?? document.activeElement.textContent"))

    async def complaints(self) -> list[str]:
        """Return the errors of the browser and violations of the security policy, without refusals of the port."""
        entries = await self._do(self.driver.get_log, "browser")
        return [entry["message"] for entry in entries if "Failed to load resource" not in entry["message"]]

    async def violations(self) -> list[str]:
        """Return the serious violations of WCAG rules that axe-core finds."""
        await self._do(lambda: self.driver.execute_script(AXE.read_text()))
        script = "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
        found = await self._do(self.driver.execute_async_script, script)
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def _act(self, css: str, act: Callable[[WebElement], None]) -> None:
        """Act on the element; try again if the page replaced the element in between."""
        while True:
            with suppress(StaleElementReferenceException):
                return act(self._found(css))

    def _click(self, element: WebElement) -> None:
        """Click it, and again if the page moved under the pointer, so that the click hit something else."""
        for _ in range(5):
            self.driver.execute_script(WATCH_CLICK, element)
            element.click()
            if self.driver.execute_script("return window.clickHit") is not False:
                return
        raise AssertionError("the element moves under every click")

    def _found(self, css: str) -> WebElement:
        return self.driver.find_element("css selector", css)

    async def _do(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(call, *arguments)


TAB, ENTER, ESCAPE, SPACE = Keys.TAB, Keys.ENTER, Keys.ESCAPE, Keys.SPACE
