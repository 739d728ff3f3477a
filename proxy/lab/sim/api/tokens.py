"""POST /tokenize and /detokenize: four bytes are one token, in both directions."""

from __future__ import annotations

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.chat import chat_prompt
from proxy.lab.sim.api.completions import prompts_of
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.prompt import token_ids


class Tokens:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("POST", "/tokenize", self.tokenize), Route("POST", "/detokenize", self.detokenize)]

    async def tokenize(self, call: Call) -> web.StreamResponse:
        body = call.body()
        call.take_model(body, self._service.config)
        prompt = chat_prompt(fields.objects(body, "messages"), body) if "messages" in body else _prompt(body, "prompt")
        tokens = token_ids(prompt)
        length = self._service.config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def detokenize(self, call: Call) -> web.StreamResponse:
        body = call.body()
        call.take_model(body, self._service.config)
        text = _prompt(body, "tokens").rstrip(b"\0")
        return json_response({"prompt": text.decode(errors="replace")})


def _prompt(body: fields.Body, name: str) -> bytes:
    return b"".join(prompts_of(body, name))
