"""Tokenizers of every kind, with control tokens of every kind, built on demand."""

import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragkv.model.checkpoint import resolve
from ragkv.model.prompt import Tokens

KINDS = [
    "byte-level BPE",
    "byte-level BPE, whole words",
    "metaspace BPE",
    "metaspace BPE, prefixed",
    "BPE that drops",
    "Unigram",
    "Unigram, NFKC",
    "WordPiece",
    "WordLevel",
]
DECLARED = ["<s>", "</s>", "<unk>", "<pad>", "<|system|>", "<|user|>"]
ADDED = ["<think>", "<tool_call>", "[INST]", "<｜User｜>", "▁<PRE>", "END"]
UNDECLARED = ["<|assistant|>"]
"""A piece of the vocabulary that only looks like a control token."""
SPACES = ["  ", "    ", "\n\n"]
NAMES = [*DECLARED, *ADDED, *UNDECLARED]
LETTERS = [chr(i) for i in range(33, 127)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def controlled(kind: str, *, flags: frozenset[str] = frozenset(), inside: bool = True) -> Any:
    """A transformers tokenizer of `kind`, with `NAMES` as its control tokens.

    `flags` are those of the added tokens (`lstrip`, `rstrip`, `single_word`, `normalized`). With `inside`, all names
    are pieces of the model's own vocabulary, otherwise only `DECLARED`.
    """
    names = [*DECLARED, *UNDECLARED, *(ADDED if inside else [])]
    words = ["the", "cat", "sat", "system", "think", "tool", "user", "end"]
    bare = _bare(kind, names, words)
    bare.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in DECLARED])
    options = {flag: flag in flags for flag in ("lstrip", "rstrip", "single_word", "normalized")}
    bare.add_tokens([AddedToken(name, special=False, **options) for name in ADDED])
    bare.add_tokens([AddedToken(run, special=False, normalized=False) for run in SPACES])
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


@functools.cache
def tokens_of(kind: str) -> Tokens:
    """The tokens of the tokenizer of this kind, or of the bundled model's ("mini")."""
    return Tokens(AutoTokenizer.from_pretrained(resolve(kind).location) if kind == "mini" else controlled(kind))


def _bare(kind: str, names: list[str], words: list[str]) -> Tokenizer:
    if kind.startswith("byte-level BPE"):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        whole = kind.endswith("whole words")  # as in Llama 3: a word of the vocabulary is never split
        bare = Tokenizer(
            models.BPE(
                vocab={t: i for i, t in enumerate([*names, *letters, "th", "the", "</", "Ġ<"])},
                merges=[("t", "h"), ("th", "e"), ("<", "/"), ("Ġ", "<")],
                ignore_merges=whole,
            )
        )
        bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)
        bare.decoder = decoders.ByteLevel()
    elif kind.startswith("metaspace BPE"):  # Gemma's; and Llama 2's, which puts a space before every text
        vocabulary = [*names, *BYTES, "▁", *LETTERS, "th", "the", "▁the"]
        bare = Tokenizer(
            models.BPE(
                vocab={t: i for i, t in enumerate(vocabulary)},
                merges=[("t", "h"), ("th", "e"), ("▁", "the")],
                unk_token="<unk>",
                byte_fallback=True,
            )
        )
        prefixed = kind.endswith("prefixed")
        prepend, strip = [normalizers.Prepend("▁")] * prefixed, [decoders.Strip(" ", 1, 0)] * prefixed
        bare.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        bare.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    elif kind == "BPE that drops":  # drops text outside its vocabulary; the merges spell the names
        merges = {name[:at]: (name[: at - 1], name[at - 1]) for name in names for at in range(2, len(name) + 1)}
        vocabulary = [*names, *(part for part in merges if part not in names), "▁", *LETTERS, "th", "the"]
        bare = Tokenizer(
            models.BPE(
                vocab={t: i for i, t in enumerate(dict.fromkeys([*vocabulary, "｜"]))},
                merges=[*merges.values(), ("t", "h"), ("th", "e")],
            )
        )
        bare.normalizer = normalizers.Replace(" ", "▁")
        bare.decoder = decoders.Replace("▁", " ")
    elif kind.startswith("Unigram"):
        scored = [*((name, 0.0) for name in names), *((name, 0.0) for name in BYTES), ("▁", -3.0)]
        scored += [*((letter, -4.0) for letter in LETTERS), *((f"▁{word}", -5.0) for word in words)]
        bare = Tokenizer(models.Unigram(scored, unk_id=names.index("<unk>"), byte_fallback=True))
        if kind.endswith("NFKC"):
            bare.normalizer = normalizers.NFKC()
        bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    elif kind == "WordPiece":
        vocabulary = [*names, *LETTERS, *(f"##{letter}" for letter in LETTERS), *words]
        bare = Tokenizer(models.WordPiece(vocab={t: i for i, t in enumerate(vocabulary)}, unk_token="<unk>"))
        bare.normalizer = normalizers.NFKC()
        bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        bare.decoder = decoders.WordPiece(cleanup=False)
    else:
        vocabulary = [*names, *LETTERS, *words]
        bare = Tokenizer(models.WordLevel(vocab={t: i for i, t in enumerate(vocabulary)}, unk_token="<unk>"))
        bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return bare
