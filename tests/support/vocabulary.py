"""Small tokenizers of every way that decoders put text together, built or trained on the spot."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragkv.model.checkpoint import resolve
from ragkv.model.prompt import Tokens

KINDS = ["bytes", "mini", "byte-level BPE", "Unigram", "byte fallback", "byte fallback, stripped"]
WORDS = "the cat sat on the mat, naïve café 漢字 и кот 🙂 — don't  stop\n\n"


@functools.cache
def tokens_of(kind: str) -> Tokens:
    """Tokenizers of every way that decoders put text together, with control tokens among the ids."""
    control = ["<unk>", "<s>", "</s>"]
    byte_names = [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["▁", "▁▁", "▁the", "▁c", "at", "a", "t", "s", "é", "漢", ".", "\n", "\ufffd"]
    if kind == "mini":
        return Tokens(AutoTokenizer.from_pretrained(resolve("mini").location))
    if kind == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*control, *letters])}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=control,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([WORDS] * 4, trainer)
    elif kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=control, unk_token="<unk>", show_progress=False)
        tokenizer.train_from_iterator([WORDS] * 4, trainer)
    else:  # Llama 2's and Gemma's: what no piece covers is written in bytes
        vocabulary = {token: i for i, token in enumerate([*control, *byte_names, *pieces])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if kind == "byte fallback, stripped" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_tokens(["<tool 漢>"])  # text that is a token, in no alphabet
    return Tokens(fast)
