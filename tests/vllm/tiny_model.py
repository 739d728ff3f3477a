"""Write a model that any CPU can serve: configuration and tokenizer, no weights. Run by vLLM's own Python.

usage: tiny_model.py MODEL_FOLDER ADAPTER_FOLDER

The engine fills in seeded random weights (`--load-format dummy`), so all engines respond alike. The words come from the
texts of the Python that runs this. The LoRA adapter is random too, of rank 8.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] if 'text' in part else '' }}{% endfor %}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools and calls as JSON, so that it shows in which order the engine has their fields."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "torch_dtype": "float32",
    "use_cache": True,
}
RANK = 8


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(folder / "tokenizer.json")
    _write(folder / "config.json", {**CONFIG, "vocab_size": size})
    _write(folder / "generation_config.json", {"eos_token_id": [2], "pad_token_id": 3, "do_sample": False})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_adapter(folder: Path, base: Path) -> None:
    import torch  # type: ignore[import-not-found]
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    hidden, head = CONFIG["hidden_size"], CONFIG["head_dim"]
    widths = {"q_proj": CONFIG["num_attention_heads"] * head, "v_proj": CONFIG["num_key_value_heads"] * head}
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for projection, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden) / 2
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK) / 2
    save_file(tensors, folder / "adapter_model.safetensors")
    _write(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(widths),
            "base_model_name_or_path": str(base),
        },
    )


def _write_tokenizer(path: Path) -> int:
    """Returns the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    tokenizer.train([str(text) for text in texts], trainer)
    tokenizer.save(str(path), pretty=False)
    return int(tokenizer.get_vocab_size())


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    model, adapter = map(Path, sys.argv[1:])
    write_model(model)
    write_adapter(adapter, model)
