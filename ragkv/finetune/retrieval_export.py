"""Train and export the mini embedder and reranker in the file layouts of bge-m3 and bge-reranker-v2-m3."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.finetune.embedder import M3, EmbedderTrainConfig, build_embedder, train_embedder
from ragkv.finetune.encoder import train_encoder_tokenizer
from ragkv.finetune.export import replace_folder
from ragkv.finetune.reranker import RerankerTrainConfig, train_reranker
from ragkv.finetune.retrieval_measure import measure_retrieval
from ragkv.finetune.trainingloop import Progress
from ragkv.finetune.trainingtext import english_texts, world_texts
from ragkv.worlds import World
from ragkv.worlds.paraphrase import paraphrases

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, XLMRobertaForSequenceClassification

__all__ = ["build_mini_embedder", "build_mini_reranker", "export_embedder", "export_reranker"]

logger = logging.getLogger(__name__)


def export_embedder(
    model: M3, tokenizer: PreTrainedTokenizerFast, destination: Path, *, notes: Mapping[str, Any]
) -> None:
    """Write bge-m3's layout in fp16: the encoder, `sparse_linear.pt`, `colbert_linear.pt` and the tokenizer."""
    import torch

    with replace_folder(destination) as folder:
        _half(model.encoder, folder)
        for name, head in (("sparse_linear", model.sparse), ("colbert_linear", model.colbert)):
            torch.save({key: value.half() for key, value in head.state_dict().items()}, folder / f"{name}.pt")
        _finish(tokenizer, folder, notes)


def export_reranker(
    model: XLMRobertaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    destination: Path,
    *,
    notes: Mapping[str, Any],
) -> None:
    """Write bge-reranker-v2-m3's layout: the cross-encoder and its tokenizer; weights in fp16."""
    with replace_folder(destination) as folder:
        _half(model, folder)
        _finish(tokenizer, folder, notes)


def build_mini_embedder(
    config: EmbedderTrainConfig, output: Path, *, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in the folder `output` and write `output/model`. Returns its figures on held-out worlds.

    The tokenizer and a checkpoint are kept in `output`, so that a killed run continues.
    """
    from transformers import AutoTokenizer

    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        logger.info("training the tokenizer")
        texts = itertools.chain(world_texts(300), _questions(100), english_texts(1_200_000))
        train_encoder_tokenizer(texts, config.shape.vocab).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = train_embedder(config, tokenizer, output, on_progress=on_progress)
    export_embedder(model, tokenizer, output / "model", notes=asdict(config))
    rows = [asdict(row) for row in measure_retrieval(output / "model", None)]
    export_embedder(model, tokenizer, output / "model", notes={**asdict(config), "heldout": rows})
    return rows


def build_mini_reranker(
    config: RerankerTrainConfig, embedder: Path, output: Path, *, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in the folder `output` from the embedder in the training folder `embedder`, and write `output/model`."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedder / "tokenizer", trust_remote_code=False)
    start = build_embedder(EmbedderTrainConfig(shape=config.shape), len(tokenizer))
    saved = torch.load(embedder / "checkpoint.pt", map_location="cpu", weights_only=True)
    for name, module in start.modules.items():
        module.load_state_dict(saved[name])
    model = train_reranker(config, start, tokenizer, output, on_progress=on_progress)
    export_reranker(model, tokenizer, output / "model", notes=asdict(config))
    rows = [asdict(row) for row in measure_retrieval(embedder / "model", output / "model")]
    export_reranker(model, tokenizer, output / "model", notes={**asdict(config), "heldout": rows})
    return rows


def _finish(tokenizer: PreTrainedTokenizerFast, folder: Path, notes: Mapping[str, Any]) -> None:
    tokenizer.save_pretrained(folder)
    (folder / "ragkv.json").write_text(json.dumps({"recipe": dict(notes)}, indent=1) + "\n", encoding="utf-8")


def _half(model: Any, folder: Path) -> None:
    """Write the weights in fp16, which halves their size. `model` itself is not changed."""
    import torch

    state = {key: value.detach().cpu().half().contiguous() for key, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(torch.float32).removeprefix("torch.")  # the dtype to load them in, as in bge-m3's config
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _questions(worlds: int) -> Iterator[str]:
    for seed in range(worlds):
        for each in paraphrases(World.generate(seed, split="train", size=24), seed=seed):
            yield each.question + "\n"
