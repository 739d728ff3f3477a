"""What LlamaIndex does with a model behind kvlane, as JSON. usage: llama_index_client.py URL"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

BASE = sys.argv[1] + "/v1"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Tell me of the sea.")]


def weather(city: str) -> str:
    """The weather in a city."""
    return city


def chat(model: str = "sim", max_tokens: int = 5) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=BASE,
        api_key="none",
        max_tokens=max_tokens,
        max_retries=0,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def refused() -> dict[str, Any]:
    try:
        chat("nope").chat(MESSAGES)
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


def leave() -> bool:
    stream = chat(max_tokens=2000).stream_chat(MESSAGES)
    next(iter(stream))
    stream.close()
    return True


response = chat().chat_with_tools([FunctionTool.from_defaults(weather)], chat_history=MESSAGES, tool_required=True)
(call,) = chat().get_tool_calls_from_response(response)
embeddings = OpenAILikeEmbedding(model_name="sim", api_base=BASE, api_key="none")
body = {
    "chat": chat().chat(MESSAGES).message.content,
    "stream": "".join(part.delta or "" for part in chat().stream_chat(MESSAGES)),
    "tool": {"name": call.tool_name, "arguments": call.tool_kwargs},
    "embeddings": len(embeddings.get_text_embedding_batch(["the sea", "the land"])),
    "error": refused(),
    "left": leave(),
}
sys.stdout.write(json.dumps(body))
