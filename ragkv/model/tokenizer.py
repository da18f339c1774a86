"""`PlainTokenizer`: what `ragkv.model.prompt.Tokens` asks of a transformers tokenizer, by the tokenizers library alone.

transformers takes longer to import than a tokenizer takes to load. Its own tokenizer is loaded when something else is
asked for, such as a chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_FACTS = (
    *(f"{kind}_token_id" for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")),
    "all_special_tokens",
    "chat_template",
    "name_or_path",
)
_METHODS = (
    *("__call__", "_encode_plus", "decode", "_decode", "get_vocab", "added_tokens_decoder"),
    *("convert_ids_to_tokens", "convert_tokens_to_ids", "_convert_token_to_id_with_added_voc"),
)
_PROBES = ("a", "", " a  12\n\n", "The hall (1994) isn't “open”;\tgrüße, 漢字 🙂\u200d", "<s>{name} a{name}{name}\n")


class PlainTokenizer:
    """`serialized` is the text of a tokenizer.json, `facts` is from `facts_of`, and `load` returns transformers' own
    tokenizer.
    """

    sp_model = None
    """Where slow tokenizers keep their vocabulary."""

    def __init__(self, serialized: str, facts: Mapping[str, Any], load: Callable[[], Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(serialized)
        self.__dict__.update({name: facts[name] for name in _FACTS})
        self._load = load
        self._whole: Any = None

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, verbose: bool = True
    ) -> dict[str, list[int]]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_load" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        self._whole = self._whole or self._load()
        return getattr(self._whole, name)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self.backend_tokenizer.get_vocab()
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        name = self.backend_tokenizer.id_to_token
        return name(ids) if isinstance(ids, int) else [name(i) for i in ids]

    def convert_tokens_to_ids(self, names: str | Iterable[str]) -> Any:
        if not isinstance(names, str):
            return [self.convert_tokens_to_ids(name) for name in names]
        found = self.backend_tokenizer.token_to_id(names)
        return self.unk_token_id if found is None else found


def facts_of(tokenizer: Any) -> tuple[str, dict[str, Any]] | None:
    """The arguments of a `PlainTokenizer` that does what `tokenizer` does; None for a tokenizer that it cannot replace.

    Its methods must be those of transformers' class for the tokenizers library, and both must give the same ids.
    """
    from transformers import PreTrainedTokenizerFast as Common

    if not isinstance(tokenizer, Common):
        return None
    if any(getattr(type(tokenizer), name) is not getattr(Common, name) for name in _METHODS):
        return None
    serialized, facts = tokenizer.backend_tokenizer.to_str(), {name: getattr(tokenizer, name) for name in _FACTS}
    plain = PlainTokenizer(serialized, facts, lambda: tokenizer)
    if plain.backend_tokenizer.to_str() != serialized or not isinstance(facts["chat_template"], str | None):
        return None
    names = [str(token) for token in facts["all_special_tokens"]] or ["a"]
    for text in (*_PROBES[:-1], *(_PROBES[-1].format(name=name) for name in names)):
        for options in (
            {"add_special_tokens": add, "split_special_tokens": split} for add in (0, 1) for split in (0, 1)
        ):
            as_bools = {name: bool(value) for name, value in options.items()}
            ids = tokenizer(text, verbose=False, **as_bools)["input_ids"]
            texts = [
                {
                    each.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                    for skip in (True, False)
                }
                for each in (tokenizer, plain)
            ]
            if plain(text, **as_bools)["input_ids"] != ids or texts[0] != texts[1]:
                return None
    return serialized, facts
