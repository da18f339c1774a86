"""Train the small model of table apb-3, which answers from long lists of variables, and its retaining heads.

`python examples/variable_model.py` writes examples/variables (about 25 minutes on one core; a stopped run goes on with
the stage that it was in). `python -m ragkv.benchmarks.papers apb-3` then fills the table.

All rows are plain causal ones: the model never sees a block, an anchor or what is passed on. Where a line refers to
another, it has to name the value at once, so that lines are understood as they are read. In half of the rows the
question stands before the list as well, as in an anchor (APB §3.3), and only the family that is asked for has to be
told. Rows grow from 64 to 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragkv.benchmarks.mini.induction import start_induction
from ragkv.finetune.retaining import RetainingConfig, train_retaining_heads
from ragkv.finetune.trainingloop import save_checkpoint
from ragkv.worlds.variable import ASK, BEGIN, HEADINGS, NAMES, STOP, VALUES, family_of, variable_list

OUTPUT = Path(__file__).parent / "variables"
END, PAD, UNKNOWN, OTHER = "<end>", "<pad>", "<unk>", "-"
WORDS = (BEGIN, ASK, STOP, OTHER, END, PAD, UNKNOWN, *NAMES, *VALUES, *HEADINGS)
IDS = {word: number for number, word in enumerate(WORDS)}
SILENT = -100
"""The label of a token after which nothing is to be said."""
STAGES = ((64, 500, 1), (128, 500, 4), (256, 600, 4), (512, 300, 4), (1024, 150, 4))
"""Tokens of a row, steps, headings."""
STEP_TOKENS = 4096
LR, WARMUP, CLIP = 2e-3, 100, 1.0
HEAD_ROWS, HEAD_STEPS, HEAD_INNER, HEAD_WORDS = 400, 600, 256, 600


def row(rng: random.Random, tokens: int, headings: int) -> tuple[list[int], list[int]]:
    """Ids, and after each what is to be said."""
    drawn = variable_list(rng, tokens // 3 - 2, headings=headings)
    refers = [line for line in drawn.known if line.refers]
    asked = rng.choice(refers if refers and rng.random() < 0.7 else drawn.known)
    before = rng.random() < 0.5
    words: list[str] = [ASK, asked.name] if before else []
    said: list[str] = ["", ""] if before else []
    words += [BEGIN, drawn.heading, STOP]
    said += ["", "", ""]
    for line in drawn.lines:
        words += [line.name, line.content, STOP]
        if before:
            said += ["", line.value if family_of(line.name) == family_of(asked.name) else OTHER, ""]
        else:
            said += ["", line.value if line.refers else "", ""]
    others = [] if before else rng.sample(drawn.known, min(len(drawn.known), max(1, tokens // 24)))
    for line in (*others, asked):
        words += [ASK, line.name, line.value]
        said += ["", line.value, END]
    return [IDS[word] for word in words], [IDS[word] if word else SILENT for word in said]


def batch(rng: random.Random, size: int, tokens: int, headings: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels `(size, n)`, filled up on the right."""
    rows = [row(rng, tokens, headings) for _ in range(size)]
    most = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [IDS[PAD]] * (most - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [SILENT] * (most - len(labels)) for _, labels in rows])


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Lines, questions, lines of other families and ends count alike, whatever their numbers, but for the last two."""
    each = nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="none")
    after_ask = nn.functional.pad(ids[:, :-1] == IDS[ASK], (1, 0)).flatten()
    labels = labels.flatten()
    kinds = {
        "other": labels == IDS[OTHER],
        "end": labels == IDS[END],
        "question": after_ask & (labels != SILENT),
    }
    kinds["line"] = (labels != SILENT) & ~kinds["other"] & ~kinds["end"] & ~kinds["question"]
    weights = {"line": 1.0, "question": 1.0, "other": 0.5, "end": 0.1}
    return torch.stack([weights[kind] * each[which].mean() for kind, which in kinds.items() if which.any()]).sum()


def new_model() -> LlamaForCausalLM:
    """Random weights with induction heads in two layers: a reference is one step, a question about it another."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
        )
    )
    start_induction(model)
    first, second = model.model.layers[1:3]
    second.self_attn.load_state_dict(first.self_attn.state_dict())
    return model


def train(folder: Path) -> LlamaForCausalLM:
    """The model after all stages, from the last one that was finished."""
    kept = folder / "training.pt"
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    first = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["stages"]
    for number, (tokens, steps, headings) in enumerate(STAGES[first:], start=first):
        rng = random.Random(f"variables:{number}")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LR * (min(1, (step + 1) / WARMUP) if number == 0 else 0.5 if tokens >= 512 else 1)
            loss = loss_of(model, *batch(rng, STEP_TOKENS // tokens, tokens, headings))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % 50 == 49:
                print(f"{tokens} tokens, step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "stages": number + 1}
        save_checkpoint(kept, state)
    kept.unlink(missing_ok=True)
    return model


def save_tokenizer(folder: Path) -> None:
    """A word is a token; a prompt is its texts and nothing else."""
    found = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    whole.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    whole.save_pretrained(folder)


def write_lessons(path: Path) -> None:
    """What the heads learn from: a question, a list, and the list's answers for the family that is asked for."""
    rng = random.Random("variables:heads")
    rows = []
    for _ in range(HEAD_ROWS):
        drawn = variable_list(rng, HEAD_WORDS // 3)
        asked = rng.choice([line for line in drawn.known if line.refers])
        question = f"{ASK} {asked.name}"
        own = [line for line in drawn.known if family_of(line.name) == family_of(asked.name)]
        answer = " ".join(f"{ASK} {line.name} {line.value}" for line in own)
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": said, "documents": [" ".join((question, *drawn.texts()))]})
    path.write_text("\n".join(map(json.dumps, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists():
        train(folder).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    lessons = folder / "lessons.jsonl"
    write_lessons(lessons)
    config = RetainingConfig(model=str(folder), data=lessons, steps=HEAD_STEPS, warmup=60, inner=HEAD_INNER)
    told = train_retaining_heads(config)
    lessons.unlink()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
