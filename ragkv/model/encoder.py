"""The transformers of embedders and rerankers: BERT and RoBERTa by torch or numpy alone, any other by transformers.

Most encoders that people embed with (MiniLM, bge, e5, bge-m3 and its reranker) are one of these two, and a question
should not wait for the imports of transformers. Tests compare the numbers with FlagEmbedding's, sentence-transformers'
and transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ModelLoadError
from ragkv.model import numpy_functional
from ragkv.model.checkpoint import computes_in
from ragkv.model.loading import quiet_loading
from ragkv.model.prompt import harden
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:
    torch, functional = LazyModule("torch"), LazyModule("torch.nn.functional")

ROBERTAS = frozenset({"camembert", "roberta", "xlm-roberta"})
"""Families (`model_type`) whose positions count from `pad_token_id` + 1."""


def half_type(device: torch.device) -> torch.dtype:
    """The type that embeddings are computed in: float16 on a GPU, bfloat16 on a processor with units for it."""
    if device.type != "cpu":
        return torch.float16
    return torch.bfloat16 if computes_in(device, torch.bfloat16) else torch.float32


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether `Bert` computes a model with this configuration."""
    usual = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    family = config.get("model_type") == "bert" or config.get("model_type") in ROBERTAS
    return family and all(config.get(name, value) == value for name, value in usual.items())


class EncodedText(NamedTuple):
    """Token ids and segments of a text or a pair, and whether it was cut."""

    ids: list[int]
    types: list[int]
    cut: bool


class EncoderTokenizer:
    """A checkpoint's tokenizer, which reads the names of special tokens in texts as text; of at most `max_tokens`."""

    def __init__(self, folder: Path, max_tokens: int, *, lower: bool = False, prompts: Sequence[str] = ()) -> None:
        """`lower`: read texts in lower case. Special tokens in one of the `prompts` are read as such, and then in texts
        too.
        """
        from tokenizers import Tokenizer, normalizers

        file = folder / "tokenizer.json"
        if file.exists():
            backend = Tokenizer.from_file(str(file))
        else:
            from transformers import AutoTokenizer

            with quiet_loading(reports=False):
                backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).backend_tokenizer
        backend.no_padding()
        if lower:
            parts = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
            backend.normalizer = normalizers.Sequence(parts)
        # what `harden` reads of a tokenizer
        self.backend_tokenizer, self.get_vocab = backend, backend.get_vocab
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self.added_tokens_decoder.items() if token.special)
        self.all_special_tokens = [self.added_tokens_decoder[i].content for i in sorted(self.special_ids)]
        if not any(name in prompt for name in self.all_special_tokens for prompt in prompts):
            harden(self)
            backend.encode_special_tokens = True
        self._max_tokens = max_tokens

    def __call__(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[EncodedText]:
        """The tokens of texts, or of pairs of a question and a text, of which the text is cut."""
        pairs = bool(texts) and not isinstance(texts[0], str)
        strategy = "only_second" if pairs else "longest_first"
        self.backend_tokenizer.enable_truncation(self._max_tokens, strategy=strategy)
        return [EncodedText(each.ids, each.type_ids, bool(each.overflowing)) for each in self._encoded(texts)]

    def beginning(self, text: str, most: int) -> str:
        """As much of a text as `most` tokens hold."""
        self.backend_tokenizer.enable_truncation(most)
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=False)
        return text[: encoding.offsets[-1][1]] if encoding.overflowing else text

    @property
    def specials(self) -> int:
        """How many special tokens surround a text."""
        return int(self.backend_tokenizer.num_special_tokens_to_add(False))

    def _encoded(self, texts: Sequence[Any]) -> list[Any]:
        found: list[Any] = self.backend_tokenizer.encode_batch(list(texts))
        return found


class Bert:
    """BERT or RoBERTa as their papers describe them, without dropout; heads are read by `weight`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, device: torch.device | None, dtype: Any) -> None:
        """`device` None computes with numpy instead of torch, in float32. ModelLoadError for missing weights."""
        self._functional: Any = functional
        if device is None:
            self._functional = numpy_functional
            self._weights: dict[str, Any] = {_plain(name): array for name, array in _arrays(folder).items()}
            self._nothing: Any = np.zeros(1, np.float32)
        else:
            tensors = checkpoint_tensors(folder)
            self._weights = {_plain(name): tensor.to(device, dtype) for name, tensor in tensors.items()}
            self._nothing = torch.zeros(1, dtype=dtype, device=device)
        self._join: Any = np.concatenate if device is None else torch.cat
        self._absent = list[str]()
        self._heads = config["num_attention_heads"]
        self._epsilon = config.get("layer_norm_eps", 1e-12)
        self._offset = config.get("pad_token_id", 1) + 1 if config["model_type"] in ROBERTAS else 0
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        self._embeddings = [self.weight(f"embeddings.{name}.weight") for name in names]
        self._norm = self.pair("embeddings.LayerNorm")
        self._layers = [self._layer(f"encoder.layer.{n}") for n in range(config["num_hidden_layers"])]
        width = (config["vocab_size"], config["hidden_size"])
        if not self._absent and tuple(self._embeddings[0].shape) != width:
            raise ValueError(f"its embeddings are of shape {tuple(self._embeddings[0].shape)}, not {width}")

    def _layer(self, name: str) -> list[tuple[Tensor, Tensor]]:
        own = [self.pair(f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
        joined = (self._join([weight for weight, _ in own]), self._join([bias for _, bias in own]))
        parts = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense")
        return [joined, *(self.pair(f"{name}.{part}") for part in (*parts, "output.LayerNorm"))]

    def weight(self, name: str) -> Tensor:
        """The weight called `name`; one that is missing is reported by `require_all`."""
        if name not in self._weights:
            self._absent.append(name)
        tensor: Tensor = self._weights.get(name, self._nothing)
        return tensor

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear layer or a norm."""
        return self.weight(f"{name}.weight"), self.weight(f"{name}.bias")

    def require_all(self, what: str) -> None:
        """ModelLoadError if a weight that was read is missing."""
        _refuse_absent(self._absent, what)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """The last hidden states (texts, longest, width) of ids that are padded on the right."""
        word, position, segment = self._embeddings
        (texts, length), linear = input_ids.shape, self._functional.linear
        places = slice(self._offset, self._offset + length)
        x = word[input_ids] + position[places] + (segment[0] if token_type_ids is None else segment[token_type_ids])
        x = self._normed(x, self._norm)
        mask = None if bool(attention_mask.all()) else attention_mask[:, None, None, :] > 0
        for joined, output, first_norm, up, down, second_norm in self._layers:
            heads = linear(x, *joined).reshape(texts, length, 3, self._heads, -1).swapaxes(1, 3)
            read = self._functional.scaled_dot_product_attention(*(heads[:, :, i] for i in range(3)), attn_mask=mask)
            x = self._normed(x + linear(read.swapaxes(1, 2).reshape(x.shape), *output), first_norm)
            x = self._normed(x + linear(self._functional.gelu(linear(x, *up)), *down), second_norm)
        return x

    def _normed(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        normed: Tensor = self._functional.layer_norm(x, x.shape[-1:], *norm, self._epsilon)
        return normed


def _plain(name: str) -> str:
    for prefix in ("bert.", "roberta."):
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint in its own types."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    if files := sorted(folder.glob("*.safetensors")):
        for file in files:
            tensors |= load_file(file)
        return tensors
    for file in sorted(folder.glob("pytorch_model*.bin")):
        tensors |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return tensors


def _arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a checkpoint in float32; NotComputedHereError for one that numpy cannot read."""
    from safetensors import safe_open

    arrays: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if not name.endswith("position_ids")]  # noqa: SIM118
            if {file.get_slice(name).get_dtype() for name in names} - {"F16", "F32"}:
                raise NotComputedHereError
            arrays |= {name: file.get_tensor(name).astype(np.float32, copy=False) for name in names}
    if not arrays:
        raise NotComputedHereError
    return arrays


class Body:
    """A checkpoint's transformer on a device: `Bert`, or transformers' own model of another family, on a processor in
    float32.
    """

    def __init__(
        self, folder: Path, what: str, device: torch.device | None, dtype: Any, *, classifier: bool = False
    ) -> None:
        """A `classifier` of another family has its head, and gives logits. ModelLoadError for missing weights,
        NotComputedHereError for a `device` None (numpy) and another family.
        """
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.device = device
        self.bert = Bert(folder, self.config, device=device, dtype=dtype) if is_plain(self.config) else None
        if self.bert is not None:
            self.bert.require_all(what)
            return
        if device is None:
            raise NotComputedHereError
        from transformers import AutoModel, AutoModelForSequenceClassification

        kind: Any = AutoModelForSequenceClassification if classifier else AutoModel
        with quiet_loading(reports=False):
            model = kind.from_pretrained(str(folder), dtype=torch.float32, trust_remote_code=False)
        require_weights(model, folder, what)
        self._model = model.to(device, dtype if device.type != "cpu" else torch.float32).eval()

    def batch(self, rows: Sequence[EncodedText]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, and `token_type_ids` where there are several, all (rows, longest)."""
        width = max(len(row.ids) for row in rows)

        def filled(values: Sequence[Sequence[int]], filler: int) -> Any:
            padded = [[*own, *[filler] * (width - len(own))] for own in values]
            return np.array(padded) if self.device is None else torch.tensor(padded, device=self.device)

        ids = filled([row.ids for row in rows], self.config.get("pad_token_id") or 0)
        batch = {"input_ids": ids, "attention_mask": filled([[1] * len(row.ids) for row in rows], 0)}
        if any(any(row.types) for row in rows):
            batch["token_type_ids"] = filled([row.types for row in rows], 0)
        return batch

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The last hidden states (rows, longest, width)."""
        if self.bert is not None:
            return self.bert(**batch)
        states: Tensor = self._model(**batch)[0]
        return states


class Classifier:
    """A sequence classifier with one label: BERT's or RoBERTa's head here, another family by transformers."""

    def __init__(self, folder: Path, what: str, device: torch.device, dtype: torch.dtype) -> None:
        """ModelLoadError for several labels and for missing weights."""
        self._body = Body(folder, what, device, dtype, classifier=True)
        config = self._body.config
        labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
        if labels != 1:
            raise ModelLoadError(f"{what} has {labels} output classes; give one with a single score.")
        if (bert := self._body.bert) is not None:
            roberta = config["model_type"] in ROBERTAS
            names = ("classifier.dense", "classifier.out_proj") if roberta else ("pooler.dense", "classifier")
            self._dense, self._score = map(bert.pair, names)
            bert.require_all(what)

    def __call__(self, rows: Sequence[EncodedText]) -> Tensor:
        """(rows,): the raw logits."""
        batch = self._body.batch(rows)
        if self._body.bert is None:
            return self._body(batch).view(-1)
        first = functional.linear(self._body(batch)[:, 0], *self._dense)
        return functional.linear(torch.tanh(first), *self._score).view(-1)


def require_weights(model: Any, folder: Path, what: str) -> None:
    """Refuse a checkpoint with missing weights, which transformers would fill with random numbers.

    The pooler may be missing, because nothing here uses it.
    """
    prefix = f"{model.base_model_prefix}."
    there = {_plain(key).removeprefix(prefix) for key in checkpoint_tensors(folder)}
    names = (_plain(key).removeprefix(prefix) for key, _ in model.named_parameters())
    _refuse_absent([name for name in names if name not in there and "pooler." not in name], what)


def _refuse_absent(names: Sequence[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ModelLoadError(f"{what} lacks weights ({names[0]}{more}), which would be random; fetch the model again.")


def pooled(hidden: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """One vector per text in float32: the concatenated results of sentence-transformers' pooling modes.

    `hidden` is (texts, longest, width), `mask` (texts, longest) with the padding on the right.
    """
    states, there = hidden.float(), mask[:, :, None].float()
    lengths = mask.sum(1)
    vectors = []
    for mode in modes:
        if mode == "cls":
            vectors.append(states[:, 0])
        elif mode == "max":
            vectors.append(states.masked_fill(there == 0, float("-inf")).amax(1))
        elif mode == "lasttoken":
            vectors.append(states[torch.arange(len(states), device=states.device), lengths - 1])
        else:
            weights = there
            if mode == "weightedmean":
                weights = there * torch.arange(1, states.shape[1] + 1, device=states.device)[None, :, None]
            total = weights.sum(1)
            vectors.append((states * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total))
    return torch.cat(vectors, -1)


_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The modes of a Pooling module; None for others than `pooled` knows, and for prompts that are not pooled."""
    named = config.get("pooling_mode")
    modes = (named,) if isinstance(named, str) else tuple(named or (_LEGACY[key] for key in _LEGACY if config.get(key)))
    return modes if modes and set(modes) <= set(_LEGACY.values()) and config.get("include_prompt", True) else None


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Tanh": lambda vectors: torch.tanh(vectors),
    "torch.nn.modules.linear.Identity": lambda vectors: vectors,
    "torch.nn.modules.activation.ReLU": lambda vectors: torch.relu(vectors),
    "torch.nn.modules.activation.GELU": lambda vectors: functional.gelu(vectors),
}


def dense_layer(config: Mapping[str, Any], folder: Path, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """A Dense module over pooled vectors, in float32; None for one with settings that are unknown here."""
    activation = _ACTIVATIONS.get(str(config.get("activation_function", "torch.nn.modules.activation.Tanh")))
    names = {config.get(f"module_{end}_name", "sentence_embedding") for end in ("input", "output")}
    if activation is None or config.get("use_residual") or names != {"sentence_embedding"}:
        return None
    tensors = {name.removeprefix("linear."): tensor for name, tensor in checkpoint_tensors(folder).items()}
    weight, bias = (tensors[name].to(device).float() if name in tensors else None for name in ("weight", "bias"))
    if weight is None or (bias is None and config.get("bias", True)):
        raise ModelLoadError(f"The layer in {folder} lacks weights; fetch the model again.")
    return lambda vectors: activation(functional.linear(vectors, weight, bias))


class SentenceEncoder:
    """A sentence-transformers model of a transformer, pooling, dense layers and normalisation."""

    def __init__(
        self,
        name: str,
        folders: Sequence[Path],
        configs: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        device: torch.device | None,
        prompts: tuple[str, str],
        lower: bool,
    ) -> None:
        """`folders` and `configs` of the transformer, the pooling and the dense layers; `prompts` before questions and
        documents. `device` None computes with numpy, one text at a time. NotComputedHereError for settings that only
        the library knows, or only torch computes.
        """
        modes = pooling_modes(configs[1])
        if device is None and (modes is None or set(modes) - {"cls", "mean"} or configs[2:]):
            raise NotComputedHereError
        layers = [dense_layer(*pair, cast("Any", device)) for pair in zip(configs[2:], folders[2:], strict=True)]
        if modes is None or None in layers or configs[0].get("is_encoder_decoder"):
            raise NotComputedHereError
        self._modes, self._layers = modes, [layer for layer in layers if layer is not None]
        self._body = Body(folders[0], f"Embedder {name!r}", device, half_type(device) if device else None)
        self.tokenizer = EncoderTokenizer(folders[0], max_tokens, lower=lower, prompts=prompts)
        self._prompts = prompts

    def tokenise(self, texts: Sequence[str], *, question: bool) -> list[EncodedText]:
        """The tokens of texts with their prompt."""
        prompt = self._prompts[0 if question else 1]
        return self.tokenizer([prompt + text for text in texts])

    def vectors(self, rows: Sequence[EncodedText]) -> list[NDArray[np.float32]]:
        """The unit vectors of one batch, in float32."""
        if self._body.device is None:
            [row] = rows
            hidden: Any = self._body(self._body.batch([row]))
            parts = [hidden[:, 0] if mode == "cls" else hidden.mean(1) for mode in self._modes]
            return list(numpy_functional.normalize(np.concatenate(parts, -1), dim=-1))
        with torch.inference_mode():
            batch = self._body.batch(rows)
            vectors = pooled(self._body(batch), batch["attention_mask"], self._modes)
            for layer in self._layers:
                vectors = layer(vectors)
            return list(functional.normalize(vectors, dim=-1).cpu().numpy())


class NotComputedHereError(Exception):
    """The model has a module or a setting that only sentence-transformers itself knows."""
