"""What LangChain does with a model behind kvlane, as JSON. usage: langchain_client.py URL"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

BASE = sys.argv[1] + "/v1"
MESSAGES = [SystemMessage("Be brief."), HumanMessage("Tell me of the sea.")]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return city


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=BASE, api_key="none", max_retries=0, **{"model": "sim", "max_tokens": 5, **fields})


def refused() -> dict[str, Any]:
    try:
        chat(model="nope").invoke(MESSAGES)
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code}
    return {}


def leave() -> bool:
    stream = chat(max_tokens=2000).stream(MESSAGES)
    next(stream)
    stream.close()
    return True


(call,) = chat().bind_tools([weather], tool_choice="required").invoke(MESSAGES).tool_calls
# Without the flag it cuts texts into tokens first, with an encoding that it downloads.
embeddings = OpenAIEmbeddings(model="sim", base_url=BASE, api_key="none", check_embedding_ctx_length=False)
body = {
    "chat": chat().invoke(MESSAGES).content,
    "stream": "".join(str(chunk.content) for chunk in chat().stream(MESSAGES)),
    "tool": {"name": call["name"], "arguments": call["args"]},
    "embeddings": len(embeddings.embed_documents(["the sea", "the land"])),
    "error": refused(),
    "left": leave(),
}
sys.stdout.write(json.dumps(body))
