"""A small tokenizer with a chat template, as a model's folder has them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'kvlane[precise]'")
pytest.importorskip("jinja2")

SPECIAL = ["<|start|>", "<|end|>", "<|pad|>"]

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def trained() -> Any:
    """Byte-level BPE of the words of this repository; made once per process."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(Path(__file__).parents[3] / "README.md").read_text()], trainer)
    return tokenizer


def write(folder: Path, template: Any = TEMPLATE, **config: Any) -> Path:
    trained().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "bos_token": {"content": "<|start|>"}, "chat_template": template, **config})
    )
    return folder
