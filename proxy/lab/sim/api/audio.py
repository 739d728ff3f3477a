"""Audio in (multipart) and audio out (bytes), without any hearing or speaking."""

from __future__ import annotations

import re

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import SERVER, Call, Service, json_response
from proxy.lab.sim.api.errors import BadRequest, invalid
from proxy.lab.sim.api.routes import Route

SAMPLES_PER_CHARACTER = 160
"""Bytes of speech for each byte of text."""

Form = dict[str, bytes]


class Audio:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/audio/transcriptions", self.transcribe),
            Route("POST", "/v1/audio/translations", self.transcribe),
            Route("POST", "/v1/audio/speech", self.speak),
        ]

    async def transcribe(self, call: Call) -> web.StreamResponse:
        """States how many bytes of audio came."""
        form = parse_form(call)
        if "file" not in form:
            raise invalid("missing", "body.file", "Field required", None)
        call.take_model({"model": form["model"].decode()} if "model" in form else {}, self._service.config)
        text = f"{len(form['file'])} bytes of audio"
        if form.get("response_format") == b"text":
            return web.Response(text=text, headers={"Server": SERVER})
        return json_response({"text": text, "usage": {"type": "duration", "seconds": 1}})

    async def speak(self, call: Call) -> web.StreamResponse:
        body = call.body()
        text = str(fields.required(body, "input")).encode()
        call.take_model(body, self._service.config)
        sound = b"RIFF" + text * SAMPLES_PER_CHARACTER
        return web.Response(body=sound, content_type="audio/wav", headers={"Server": SERVER})


def parse_form(call: Call) -> Form:
    """The parts of a multipart body by their names."""
    boundary = re.search(r'boundary="?([^";]+)', call.request.headers.get("Content-Type", ""))
    if boundary is None:
        raise BadRequest("Missing boundary in multipart.")
    parts = (b"\r\n" + call.raw).split(b"\r\n--" + boundary[1].encode())
    return dict(_part(part) for part in parts[1:-1])


def _part(part: bytes) -> tuple[str, bytes]:
    head, _, content = part.partition(b"\r\n\r\n")
    name = re.search(rb'\bname="([^"]*)"', head)
    return (name[1].decode() if name else "", content)
