"""The encoder of the mini embedder and reranker: a small XLM-RoBERTa and its tokenizer, in bge-m3's file layout.

The tokenizer ignores case and spaces, so that a name has the same tokens everywhere. Any UTF-8 text can be tokenised,
in bytes if necessary. Ids 0 to 4 are XLM-R's special tokens in its order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig

__all__ = ["MAX_TOKENS", "SPECIAL_IDS", "EncoderShape", "encoder_config", "train_encoder_tokenizer"]

MAX_TOKENS = 512
"""The longest text, with special tokens. Positions start after the padding id, as in XLM-R."""
SPECIAL_IDS = 5
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_PIECES = r"[\p{L}\p{M}]+|\p{N}{1,2}|[^\s\p{L}\p{M}\p{N}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The sizes of the encoder, which are written to `ragkv.json`."""

    hidden: int = 192
    layers: int = 3
    heads: int = 6
    intermediate: int = 512
    vocab: int = 4096

    def __post_init__(self) -> None:
        if min(self.hidden, self.layers, self.heads, self.intermediate) < 1 or self.hidden % self.heads:
            raise ValueError("sizes must be positive and hidden a multiple of heads")
        if self.vocab < 300:
            raise ValueError("vocab must be at least 300: all bytes and the special tokens")


def encoder_config(shape: EncoderShape, vocab: int, **more: Any) -> XLMRobertaConfig:
    """XLM-R's configuration for `vocab` tokens. `more` are further fields, such as `num_labels=1`."""
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=MAX_TOKENS + 2,
        type_vocab_size=1,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **more,
    )


def train_encoder_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`. It encodes a text as `<s> A </s>` and a pair as `<s> A </s></s> B </s>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )
