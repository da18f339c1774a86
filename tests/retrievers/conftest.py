"""Small encoders with random weights in the file layouts of bge-m3, bge-reranker-v2-m3 and sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = (
    "Halden Works was founded by Maren Quist in the town of Oslo. "
    "La ville de Paris est la capitale de la France. "
    "Der Fluss fließt durch die Stadt. 東京は日本の首都です。 Москва столица России. "
    "The price of copper rose again, and the mill in the north closed its doors. "
)
WIDTH, POSITIONS = 32, 514  # as in bge-reranker-base: 512 tokens, because positions start at 2


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.retrievers.embedders.BATCH", 4)


@pytest.fixture(autouse=True, scope="session")
def exact() -> Iterator[None]:
    """Float32, also where the processor has units for bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragkv.model.encoder.half_type", lambda device: torch.float32)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """XLM-R's: unigram, `<s> A </s>` and `<s> A </s></s> B </s>`, ids <s> 0, <pad> 1, </s> 2, <unk> 3."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    control = ["<s>", "<pad>", "</s>", "<unk>"]
    bare = Tokenizer(models.Unigram())
    bare.normalizer = normalizers.NFKC()
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=control, unk_token="<unk>", show_progress=False)
    bare.train_from_iterator([WORDS], trainer)
    bare.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    from tokenizers import decoders

    bare.decoder = decoders.Metaspace()
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", unk_token="<unk>", model_max_length=512, **names
    )


def _config(tokenizer: Any, **more: Any) -> Any:
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        type_vocab_size=1,
        initializer_range=0.3,  # large enough for different scores
        **more,
    )


@pytest.fixture(scope="session")
def embedder_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bge-m3's layout."""
    from transformers import XLMRobertaModel

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("encoders") / "bge"
    XLMRobertaModel(_config(tokenizer)).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(torch.nn.Linear(WIDTH, WIDTH).state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    return folder


@pytest.fixture(scope="session")
def reranker_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bge-reranker-v2-m3's layout."""
    from transformers import XLMRobertaForSequenceClassification

    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("encoders") / "reranker"
    XLMRobertaForSequenceClassification(_config(tokenizer, num_labels=1)).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentence_folder(embedder_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in sentence-transformers' layout: mean pooling, and a prompt before questions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tmp_path_factory.mktemp("encoders") / "sentence"
    body = Transformer(str(embedder_folder))
    model = SentenceTransformer(
        modules=[body, Pooling(WIDTH)], device="cpu", prompts={"query": "The question of the town: ", "document": ""}
    )
    model.save(str(folder), create_model_card=False)
    return folder
