"""Tokenizer folders with chat templates, for tests of chats."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
# Plain ChatML, as many models bring it.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same with the blocks that mark the assistant's text.
MARKED = """{{ bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Leaves out what the assistant thought in all turns but the last, and writes tools and calls.
THINKING = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' and not loop.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' + (call | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_chat_folder(folder: Path, template: str, *, vocab_size: int = 300) -> Path:
    """Write a small byte-level tokenizer with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["assistant user the answer is what is the sum of"] * 9, trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, count: int = 40, *, turns: int = 2) -> Path:
    """Write chats of sums, each of other length."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [{"role": "system", "content": "Be brief."}]
            for turn in range(turns):
                left, right = number, turn + number % 7
                question = "what is the sum of " + "the " * (number % 5) + f"{left} and {right}?"
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": f"the answer is {left + right}"})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_preferences(path: Path, count: int = 40) -> Path:
    """Write preferences of sums, in messages after a prompt, each of other length."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            question = "what is the sum of " + "the " * (number % 4) + f"{number} and 1?"
            record = {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": f"the answer is {number + 1}"}],
                "rejected": [{"role": "assistant", "content": "what " * (number % 3 + 1)}],
            }
            file.write(json.dumps(record) + "\n")
    return path
