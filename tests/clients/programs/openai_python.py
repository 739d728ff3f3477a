"""What the openai client for Python does with a model behind kvlane, as JSON. usage: openai_python.py URL"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

api = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def chat(**fields: Any) -> Any:
    return api.chat.completions.create(**{"model": "sim", "messages": MESSAGES, "max_tokens": 5, **fields})


def refused() -> dict[str, Any]:
    try:
        chat(model="nope")
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


def leave() -> bool:
    with chat(max_tokens=2000, stream=True) as stream:
        next(iter(stream))
    return True


called = chat(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0].function
body = {
    "chat": chat().choices[0].message.content,
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True)),
    "tool": {"name": called.name, "arguments": json.loads(called.arguments)},
    "embeddings": len(api.embeddings.create(model="sim", input=["the sea", "the land"]).data),
    "error": refused(),
    "left": leave(),
}
sys.stdout.write(json.dumps(body))
