"""The tokenizer and chat template in a GGUF file, by llama.cpp, with the methods of a transformers tokenizer that
`ragkv.model.prompt.Tokens` calls.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ragkv.model.llama_cpp import LlamaFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
_NONE = -1
"""llama.cpp's id for a token that a vocabulary lacks."""


class ControlToken(NamedTuple):
    """As tokenizers' `AddedToken`."""

    content: str
    special: bool


class GgufTokenizer:
    """llama.cpp's tokenizer. Text becomes a control token only if it is the template's own (`split_special_tokens`)."""

    sep_token_id = cls_token_id = mask_token_id = None

    def __init__(self, file: LlamaFile) -> None:
        self._file, self._api, self._vocab = file, file.api, file.vocab
        self.name_or_path = str(file.path)
        api, vocab = self._api, self._vocab
        marked = {i: api.llama_vocab_get_attr(vocab, i) for i in range(file.vocab_size)}
        marked = {i: marks for i, marks in marked.items() if marks & (_CONTROL | _USER_DEFINED | _UNKNOWN)}
        texts = {i: self._text(i) for i in marked}
        self.added_tokens_decoder = {
            i: ControlToken(texts[i], bool(marks & _CONTROL)) for i, marks in marked.items() if not marks & _UNKNOWN
        }
        self.unk_token_id = next((i for i, marks in marked.items() if marks & _UNKNOWN), None)
        self.bos_token_id = self._known(api.llama_vocab_bos(vocab))
        self.eos_token_id = self._known(api.llama_vocab_eos(vocab))
        self.pad_token_id = self._known(api.llama_vocab_pad(vocab))
        self.end_ids = frozenset(i for i in marked if api.llama_vocab_is_eog(vocab, i))
        """All tokens that end an answer."""
        named = (self.unk_token_id, self.bos_token_id, self.eos_token_id)
        self.all_special_tokens = [self._text(i) for i in named if i is not None]
        template = api.llama_model_chat_template(file.handle, None)
        self.chat_template = None if template is None else template.decode(errors="replace")
        self._hidden = frozenset(i for i, token in self.added_tokens_decoder.items() if len(token.content.strip()) > 1)
        names = sorted((self.added_tokens_decoder[i].content for i in self._hidden), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, verbose: bool = True
    ) -> dict[str, list[int]]:
        ids = self._ids(text, add=add_special_tokens, parse=not split_special_tokens)
        if split_special_tokens and not self._hidden.isdisjoint(ids):
            # llama.cpp matches the user-defined ones in any text: cut their names
            pieces, start = [], 0
            for match in self._names.finditer(text):
                pieces.append(text[start : match.start() + 1])
                start = match.start() + 1
            ids = [i for piece in (*pieces, text[start:]) for i in self._ids(piece, add=False, parse=False)]
        return {"input_ids": ids}

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        count = len(ids)
        tokens = (ctypes.c_int32 * count)(*ids)
        size = 32 * count + 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._api.llama_detokenize(
                self._vocab, tokens, count, buffer, size, False, not skip_special_tokens
            )
            if length >= 0:
                return buffer.raw[:length].decode(errors="replace")
            size = -length

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self._text(ids) if isinstance(ids, int) else [self._text(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.get_vocab().get(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self._pieces

    @cached_property
    def _pieces(self) -> dict[str, int]:
        return {self._text(i): i for i in range(self._file.vocab_size)}

    def constraints(self, end_ids: Sequence[int]) -> Any:
        """llguidance's tokenizer of this vocabulary."""
        from llguidance import LLTokenizer

        pieces = [self._piece(i) for i in range(self._file.vocab_size)]
        for i, token in self.added_tokens_decoder.items():
            if token.special or i in self._hidden:
                pieces[i] = b"\xff" + pieces[i]  # as llguidance marks what is no text
        tokenize = ctypes.cast(self._api.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
        make: Any = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]  # the package's stub lacks it
        return make(tokens=pieces, vocab_ptr=self._vocab, tokenize_fptr=tokenize, eos_token=list(end_ids) or None)

    def get_chat_template(self, *, tools: Any = None) -> str:
        named = self._api.llama_model_chat_template(self._file.handle, b"tool_use") if tools else None
        return str(self.chat_template) if named is None else named.decode(errors="replace")

    def apply_chat_template(
        self, messages: list[Any], *, chat_template: str, tools: Any, tokenize: bool, **settings: Any
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id, "unk_token": self.unk_token_id}
        texts = {name: self._text(i) for name, i in names.items() if i is not None}
        rendered, _ = render_jinja_template([messages], tools=tools, chat_template=chat_template, **texts, **settings)
        return str(rendered[0])

    def _known(self, token_id: int) -> int | None:
        return None if token_id == _NONE else token_id

    def _text(self, token_id: int) -> str:
        if not 0 <= token_id < self._file.vocab_size:
            return ""
        return (self._api.llama_vocab_get_text(self._vocab, token_id) or b"").decode(errors="replace")

    def _piece(self, token_id: int) -> bytes:
        """The bytes that a token spells."""
        buffer = ctypes.create_string_buffer(256)
        length = self._api.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._api.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    def _ids(self, text: str, *, add: bool, parse: bool) -> list[int]:
        if not text and not add:
            return []
        encoded = text.encode()
        size = len(encoded) + 4
        while True:
            tokens = (ctypes.c_int32 * size)()
            count = self._api.llama_tokenize(self._vocab, encoded, len(encoded), tokens, size, add, parse)
            if count >= 0:
                return tokens[:count]
            size = -count
