"""Checkpoint directories with a small byte-level BPE and one chat template of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tests.text.tool_templates import TOOL_SPECIALS, TOOL_TEMPLATES

CORPUS = (
    "The quick brown fox jumps over the lazy dog. You are a helpful assistant.",
    "Hello, how are you? I am fine. What is 12 + 30? It is 42. user assistant system",
    "Grüße aus Köln, 你好世界, привет мир, emoji: 🎉🚀. start end header id eot think",
)

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

THINKING = """{%- for message in messages %}
{%- set content = message['content'] %}
{%- if message['role'] == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""

COUNTING = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + ' ' + loop.index|string + '\\n' }}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MOVING_SYSTEM = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if loop.last %}{{- system }}{%- endif %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ALTERNATING = """{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{- ' ' + message['content'] + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", None),
    "llama3": (LLAMA3, "<|eot_id|>", "<s>"),
    "thinking": (THINKING, "<|im_end|>", None),
    "counting": (COUNTING, "<|im_end|>", None),
    "moving_system": (MOVING_SYSTEM, "<|im_end|>", None),
    "alternating": (ALTERNATING, "</s>", "<s>"),
    "none": (None, "<|im_end|>", "<s>"),
}


def write_model(path: Path, kind: str, *, extra: tuple[AddedToken, ...] = ()) -> Path:
    """The text side of a checkpoint whose template is the one of this kind."""
    template, eos, bos = (TEMPLATES | TOOL_TEMPLATES)[kind]
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("</think>", normalized=False)])
    tokenizer.add_special_tokens(list(extra))
    if kind in TOOL_TEMPLATES:
        tokenizer.add_special_tokens(list(TOOL_SPECIALS))
    if bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": eos} | (
        {"bos_token": {"__type": "AddedToken", "content": bos}} if bos else {}
    )
    _write(path / "tokenizer_config.json", config)
    _write(path / "generation_config.json", {"eos_token_id": [tokenizer.token_to_id(eos), 0]})
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
