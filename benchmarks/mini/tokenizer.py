"""The mini model's tokenizer: byte-level BPE that gives a name the same tokens wherever it stands.

A space before a capital letter or a digit is a token of its own. So "Halden" has the same token ids after a space,
after a newline and at the start of a chunk, and copying a name out of a document means matching equal tokens. Any UTF-8
text round-trips; there is no unknown token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ragkv.config import PromptConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "INSTRUCTION", "SPECIAL_TOKENS", "train_tokenizer"]

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|system|>", "<|user|>", "<|assistant|>")
"""In the order of their ids; padding is 0."""

INSTRUCTION = PromptConfig().system

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_PIECES = (
    r"\n+"  # a paragraph break is one token
    r"| (?=[\p{Lu}\p{Lt}\p{N}])"  # the space before a name or number stands alone
    r"| ?[\p{Ll}\p{Lo}\p{Lm}][\p{L}\p{M}]*"
    r"|[\p{Lu}\p{Lt}][\p{L}\p{M}]*"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 3072) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`, with the special tokens and the chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
