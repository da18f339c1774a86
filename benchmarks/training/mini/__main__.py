"""`python -m ragkv.benchmarks.training.mini`: train, evaluate and export the bundled models.

The language model is evaluated by greedy generation on held-out worlds, whose names it never saw. This uses plain
transformers on purpose: ragkv's engines `full` and `block` must reproduce the figures.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ragkv.benchmarks.evaluation.worlds.passages import passages
from ragkv.benchmarks.evaluation.worlds.text import Cloze, clozes, english_sentences, reference_texts
from ragkv.benchmarks.evaluation.worlds.world import QuestionKind, World
from ragkv.benchmarks.training.mini.data import (
    additive_mask,
    chunk_text,
    layout,
    prefix_text,
    prose_passages,
    suffix_text,
    train_tokenizer,
)
from ragkv.benchmarks.training.mini.retrieval import (
    EmbedderTrainConfig,
    RerankerTrainConfig,
    build_mini_embedder,
    build_mini_reranker,
    english_texts,
    world_texts,
)
from ragkv.benchmarks.training.mini.train import MiniTrainConfig, chosen_config, train_mini
from ragkv.cli.console import echo, note, print_json
from ragkv.cli.main import CommandGroup, SingleCommand, log_to_stderr, run
from ragkv.cli.options import Debug, Json, Quiet
from ragkv.errors import UsageError
from ragkv.finetune.block import METADATA, replace_folder, visible
from ragkv.finetune.data import Progress

logger = logging.getLogger(__name__)

LayoutName = Literal["full", "block", "single"]
Kind = Literal[QuestionKind, "cloze"]


def evaluate_mini(model_dir: Path | str, **settings: Any) -> list[dict[str, Any]]:
    """Measure the checkpoint in `model_dir`, in fp32 on the CPU; the settings are those of `measure`."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False).eval()
    return measure(model, tokenizer, **settings)


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    contexts: int = 25,
    questions: int = 8,
    passage_counts: Sequence[int] = (4, 8, 12),
    layouts: Sequence[LayoutName] = ("full", "block", "single"),
    seed: int = 1,
    split: Literal["train", "heldout"] = "heldout",
) -> list[dict[str, Any]]:
    """Ask up to `questions` questions of each kind on each of `contexts` worlds.

    A row has the share of `n` questions of one kind whose gold values are substrings of the greedy answer. A context
    holds passages of one world. Cloze questions are asked on as many contexts from Python's language reference. The
    layout "single" has one passage.
    """
    hits: dict[tuple[LayoutName, int, Kind], list[bool]] = defaultdict(list)
    for index in range(contexts):
        for name in layouts:
            for count in passage_counts if name != "single" else (1,):
                rng = random.Random(f"{seed}:{index}:{count}")
                world = World.generate(seed * 1_000_003 + index, split=split, size=14 + 2 * count)
                texts = passages(rng, tokenizer, world)[:count]
                asked = world.ask(rng, world.stated(texts), questions)
                answers = greedy_answers(model, tokenizer, texts, [q.question for q in asked], block=name == "block")
                for question, answer in zip(asked, answers, strict=True):
                    hits[name, count, question.kind].append(question.right(answer))
                prose = prose_passages(rng, tokenizer, reference_texts(), count)
                blanks = _clozes(rng, prose, questions)
                answers = greedy_answers(model, tokenizer, prose, [q.question for q in blanks], block=name == "block")
                for blank, answer in zip(blanks, answers, strict=True):
                    hits[name, count, "cloze"].append(blank.gold in " ".join(answer.split()))
    return [
        {"layout": name, "passages": count, "kind": kind, "accuracy": sum(found) / len(found), "n": len(found)}
        for (name, count, kind), found in sorted(hits.items())
    ]


def _clozes(rng: random.Random, texts: Sequence[str], count: int) -> list[Cloze]:
    """Up to `count` cloze questions about different sentences."""
    sentences = list(dict.fromkeys(sentence for text in texts for sentence in english_sentences(text)))
    rng.shuffle(sentences)
    return [cloze for sentence in sentences for cloze in clozes(rng, sentence)][:count]


def greedy_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    questions: Sequence[str],
    *,
    block: bool = False,
    max_new_tokens: int = 96,
) -> list[str]:
    """Greedy answers to questions on one context, which is run once; the questions are one batch."""
    if not questions:
        return []
    encoded = tokenizer([prefix_text(), *map(chunk_text, texts)], add_special_tokens=False)["input_ids"]
    asked = tokenizer([suffix_text(question) for question in questions], add_special_tokens=False)["input_ids"]
    flat = [token for part in encoded for token in part]
    row = layout(len(encoded[0]), [len(part) for part in encoded[1:]], [])

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    seen = visible(tensor([row.segments]), tensor([row.asks], torch.bool), tensor([block], torch.bool))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.model(
            input_ids=tensor([flat]),
            attention_mask=additive_mask(seen, model.dtype),
            position_ids=tensor([row.positions]),
            past_key_values=cache,
            use_cache=True,
        )
    cache.batch_repeat_interleave(len(questions))
    pads = [max(map(len, asked)) - len(ids) for ids in asked]  # between the context and a question
    pad = int(tokenizer.pad_token_id)
    tokens = tensor([[*flat, *[pad] * count, *ids] for count, ids in zip(pads, asked, strict=True)])
    mask = [[1] * len(flat) + [0] * count + [1] * len(ids) for count, ids in zip(pads, asked, strict=True)]
    generated = model.generate(
        input_ids=tokens,
        attention_mask=tensor(mask),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    answers: list[str] = tokenizer.batch_decode(generated[:, tokens.shape[1] :], skip_special_tokens=True)
    return answers


def build_mini(config: MiniTrainConfig, output: Path, *, on_progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train in the folder `output` and write `output/model`. Returns the accuracies on 25 held-out worlds.

    Each row has layout, passages, kind, accuracy and n. The tokenizer and a checkpoint are kept in `output`, so that a
    killed run continues.
    """
    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").exists() and config.start is not None:
        AutoTokenizer.from_pretrained(config.start, trust_remote_code=False).save_pretrained(folder)
    elif not (folder / "tokenizer.json").exists():
        logger.info("training the tokenizer")
        train_tokenizer(itertools.chain(world_texts(400), english_texts(1_200_000))).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = train_mini(config, tokenizer, output, on_progress=on_progress).cpu()
    rows = measure(model, tokenizer, contexts=25)
    export_mini(model, tokenizer, output / "model", config=config, rows=rows)
    return rows


def export_mini(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    destination: Path,
    *,
    config: MiniTrainConfig,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the weights in bfloat16, the tokenizer, generation defaults and `ragkv.json` to `destination`.

    `model` itself is not changed. `rows` are the held-out accuracies to record.
    """
    metadata = {
        "block_tuned": any(stage.block_share > 0 for stage in config.stages),
        "sink": "prefix",
        "chunk_tokens": 96,
        "history": "search",  # it is trained on single questions
        "recipe": {
            **asdict(config),
            "heldout_accuracy": [{**row, "accuracy": round(row["accuracy"], 4)} for row in rows],
        },
    }
    with replace_folder(destination) as folder:
        copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16, trust_remote_code=False)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = GenerationConfig(
            do_sample=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        copy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


COMMAND = "python -m ragkv.benchmarks.training.mini"
Output = Annotated[Path, typer.Option("--output", help="Folder for the model; checkpoints are kept in it too.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and data.")]
Scale = Annotated[float, typer.Option("--scale", help="Multiply the steps, for a quick try or a longer run.")]
TrainedOn = Annotated[str, typer.Option("--device", help="cpu or cuda.")]

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
retrieval = typer.Typer(
    cls=CommandGroup, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


@app.command(cls=SingleCommand)
def mini(
    output: Output,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Continue from this model with the stages of all kinds, instead of from random weights.",
            show_default=False,
        ),
    ] = None,
    full_only: Annotated[
        bool,
        typer.Option(
            "--full-only",
            help="Train no row in the block layout; without --start, one and two hops only.",
        ),
    ] = False,
    autocast: Annotated[
        bool,
        typer.Option(
            "--autocast/--no-autocast", help="Multiply in bf16, which is faster on GPUs and on CPUs with bf16 units."
        ),
    ] = True,
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the bundled mini model again: tokenizer, stages, evaluation on held-out worlds, Hugging Face folder.

    The model is written to OUTPUT/model. A stopped run continues from its last checkpoint. The commands `embedder` and
    `reranker` train the other two bundled models; see their own `--help`.

    Example: `python -m ragkv.benchmarks.training.mini --output mini-model`
    """
    log_to_stderr(debug=debug)
    config = MiniTrainConfig(seed=seed, device=device, autocast=autocast)
    config = chosen_config(config, start=start, full_only=full_only, scale=scale)

    show = None if quiet or as_json else _show("gold_accuracy", "gold tokens right")
    rows = build_mini(config, output, on_progress=show)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        echo(f"{row['layout']}, {row['passages']} passages, {row['kind']}: {row['accuracy']:.1%} of {row['n']}")


@retrieval.callback()
def choose(debug: Debug = False) -> None:
    """Train the bundled mini embedder and reranker."""
    log_to_stderr(debug=debug)


@retrieval.command()
def embedder(
    output: Output,
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the bundled mini embedder again: tokenizer, three heads, held-out retrieval, bge-m3's file layout.

    The model is written to OUTPUT/model. A stopped run continues from its last checkpoint.

    Example: `python -m ragkv.benchmarks.training.mini embedder --output mini-embedder`
    """
    config = EmbedderTrainConfig(seed=seed, device=device)
    config = replace(config, steps=max(1, round(config.steps * scale)))
    _print_retrieval(
        build_mini_embedder(config, output, on_progress=None if quiet or as_json else _show("dense")), as_json
    )


@retrieval.command()
def reranker(
    output: Output,
    embedder: Annotated[Path, typer.Option("--embedder", help="The embedder's --output.")],
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the bundled mini reranker again, from the mini embedder; bge-reranker-v2-m3's file layout.

    Example: `python -m ragkv.benchmarks.training.mini reranker --embedder mini-embedder --output mini-reranker`
    """
    for needed in ("checkpoint.pt", "tokenizer", "model"):
        if not (embedder / needed).exists():
            raise UsageError(f"{embedder} holds no {needed}; name the --output of a finished `embedder` run.")
    config = RerankerTrainConfig(seed=seed, device=device)
    config = replace(config, steps=max(1, round(config.steps * scale)))
    show = None if quiet or as_json else _show("first")
    _print_retrieval(build_mini_reranker(config, embedder, output, on_progress=show), as_json)


def _show(share: str, words: str = "best passage right") -> Callable[[Mapping[str, float | int | str]], None]:
    def show(step: Mapping[str, float | int | str]) -> None:
        if int(step["step"]) % 10 == 1:
            stage = f" ({step['stage']})" if "stage" in step else ""
            note(
                f"step {step['step']} of {step['steps']}{stage}: loss {float(step['loss']):.3f}, {words} "
                f"{float(step[share]):.3f}, {float(step['seconds']):.0f} s"
            )

    return show


def _print_retrieval(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        echo(
            f"{row['slice']}, {row['system']}: recall@5 {row['recall_5']:.1%}, nDCG@10 {row['ndcg_10']:.3f} "
            f"of {row['n']}"
        )


def main() -> None:
    """Entry point of `python -m ragkv.benchmarks.training.mini`."""
    named = {"embedder", "reranker"}.intersection(sys.argv[1:2])
    run(retrieval if named else app, COMMAND)


if __name__ == "__main__":
    main()
