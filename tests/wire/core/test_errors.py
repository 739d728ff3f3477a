"""Errors are shown in few words."""

from __future__ import annotations

import aiohttp
import pytest

from proxy.core.errors import cause
from tests.helpers.ports import free_port


async def test_an_error_of_a_connection_is_shown_without_the_address() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError) as refused:
            await http.get(f"http://127.0.0.1:{free_port()}")
    assert cause(refused.value) == "Connection refused"


def test_an_error_of_a_file_is_shown_without_its_name() -> None:
    with pytest.raises(OSError) as missing:
        open("/none/there")  # noqa: SIM115
    assert cause(missing.value) == "No such file or directory"


def test_an_error_without_a_message_is_shown_by_its_class() -> None:
    assert cause(TimeoutError()) == "TimeoutError"
    assert cause(ValueError("no JSON")) == "no JSON"
