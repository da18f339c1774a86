"""Writes the table of GB per million tokens into docs/operations.md, from models' published configs: `make cli-docs`.

Bytes per token of one encoding are 2 · layers · KV heads · head dim · 2 bytes (bf16); `int8` and `int4` keep within the
bits per number that the codecs promise.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ragkv.store import Int4, Int8

PAGE = Path(__file__).parent.parent / "operations.md"
BEGIN, END = "<!-- sizing -->\n", "<!-- /sizing -->\n"


class Model(NamedTuple):
    """Facts of a model's config.json."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """In bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


MODELS = (
    Model("Qwen3 4B", 36, 8, 128),
    Model("Gemma 3 4B", 34, 4, 256),
    Model("Llama 3.1 8B", 32, 8, 128),
    Model("Qwen3 8B", 36, 8, 128),
    Model("Mistral Nemo 12B", 40, 8, 128),
    Model("Phi-4 14B", 40, 10, 128),
)


def sizing() -> str:
    """The table in Markdown, GB of 1e9 bytes."""
    shares = {codec.id: (codec.key_bits + codec.value_bits) / 32 for codec in (Int8(), Int4())}
    lines = [
        "| model | layers x KV heads x head dim | KiB per token | `raw` | `int8` | `int4` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        million = model.bytes_per_token / 1000  # bytes per token times a million tokens, in GB
        sizes = [million, million * shares["int8"], million * shares["int4"]]
        shape = f"{model.layers} x {model.kv_heads} x {model.head_dim}"
        cells = [model.name, shape, f"{model.bytes_per_token / 1024:.0f}", *(f"{size:.0f} GB" for size in sizes)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table as it should be."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + sizing() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
