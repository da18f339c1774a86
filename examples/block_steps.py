"""How fast a model learns Block-Attention: accuracy over fine-tuning steps, with and without position re-encoding.

`python examples/block_steps.py` tunes examples/ablation/vanilla, a model that has never seen a block, into
examples/ablation/block and examples/ablation/no-positions, and writes what it measures on held-out worlds
meanwhile to examples/ablation/steps.json. `python -m ragkv.benchmarks.papers block-4` draws it (Block-Attention Figure
4), and `python -m ragkv.benchmarks.papers block-1` compares the three models (Table 1). About a quarter of an hour a
variant on two cores. If it is stopped, the same command continues from there.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from ragkv.benchmarks.evaluation.metrics import Task, score
from ragkv.benchmarks.evaluation.tasks import make_task
from ragkv.benchmarks.evaluation.worlds.passages import write_world_examples
from ragkv.benchmarks.papers.table import commit_of
from ragkv.config import IndexConfig, PromptConfig
from ragkv.decoding import GREEDY
from ragkv.doctor.specs import parse_specs
from ragkv.errors import RagkvError, UsageError
from ragkv.finetune.block import BlockTuneConfig, finetune_block, replace_folder
from ragkv.index.contexts import Contexts, given_chunk
from ragkv.model.checkpoint import resolve
from ragkv.model.language_model import LanguageModel

HERE = Path(__file__).parent
VARIANTS = ("block", "no-positions")
"""Each is also the preset of the engine `block` that reads the model as it was tuned."""
MEASURED = (0, 10, 25, 50, 100, 150, 200)
TASKS = {kind: f'passages(kind="{kind}")' for kind in ("one hop", "two hops")}
"""Held-out worlds, 8 chunks, by the kind of question."""


class Record:
    """steps.json: the settings, and a point for each variant, step, engine and kind of question."""

    def __init__(self, path: Path, settings: Mapping[str, object], *, fingerprint: str) -> None:
        self.path = path
        self.report: dict[str, object] = {"commit": commit_of(HERE), "fingerprint": fingerprint[:12]}
        self.report |= {"settings": dict(settings), "points": []}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if changed := [
                name
                for name, now, then in (
                    ("weights", fingerprint[:12], known["fingerprint"]),
                    *((name, value, known["settings"].get(name)) for name, value in settings.items()),
                )
                if now != then
            ]:
                raise UsageError(
                    f"{path} was made with other settings ({', '.join(changed)}); give those, or another --output."
                )
            self.report = known

    def steps(self, variant: str) -> set[int]:
        """The steps that have all points of a variant, which are written together."""
        return {point["step"] for point in self.report["points"] if point["variant"] == variant}

    def add(self, points: list[dict[str, object]]) -> None:
        self.report["points"] += points
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(json.dumps(point) for point in self.report["points"])
        head = json.dumps({name: value for name, value in self.report.items() if name != "points"}, indent=1)[:-2]
        fresh.write_text(f'{head},\n "points": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        fresh.replace(self.path)


def scores(model: LanguageModel, engine: str, tuning: Mapping[str, Mapping[str, str]], task: Task) -> dict[str, float]:
    """The metric of every greedy answer, by question; nothing is cached, as the model is still in training."""
    with Contexts(model, (), IndexConfig(default_engine=engine, tuning=tuning)) as contexts:
        questions = [
            {
                "question": example.question,
                "chunks": [given_chunk(contexts.chunk(text, chunk_id=text), "") for text in reversed(example.chunks)],
            }
            for example in task.examples
        ]
        options = {"max_new_tokens": task.max_new_tokens, "decoding": GREEDY}
        answers = contexts.query_each(questions, **options).in_order()
    return {
        example.example_id: score(task.metric, answer.text, example)
        for example, answer in zip(task.examples, answers, strict=True)
    }


def measurer(variant: str, tasks: Mapping[str, Task], record: Record) -> Callable[[int, LanguageModel], None]:
    """What `finetune_block` calls after every step."""

    def measure(step: int, model: LanguageModel) -> None:
        if step not in record.report["settings"]["measured"] or step in record.steps(variant):
            return
        points = []
        for name, tables in (("full", {}), ("block", {"block": {"preset": variant}})):
            for kind, task in tasks.items():
                found = scores(model, name, tables, task)
                accuracy = sum(found.values()) / len(found)
                points.append(
                    {
                        "variant": variant,
                        "step": step,
                        "engine": name,
                        "kind": kind,
                        "accuracy": accuracy,
                        "n": len(found),
                        "scores": found,
                    }
                )
                print(f"{variant}, step {step}, {name}, {kind}: {accuracy:.1%} of {len(found)}", file=sys.stderr)
        record.add(points)

    return measure


def tune(variant: str, config: BlockTuneConfig, tasks: Mapping[str, Task], record: Record, output: Path) -> None:
    """Train one variant into the folder `output`, from where it was stopped."""

    def show(step: Mapping[str, float]) -> None:
        if step["step"] % 10 == 0 and "loss" in step:
            print(
                f"{variant}, step {step['step']}: loss {step['loss']:.3f}, {step['seconds']:.0f} s",
                file=sys.stderr,
            )

    finetune_block(config, on_progress=show, on_step=measurer(variant, tasks, record))
    with replace_folder(output) as folder:
        for path in config.output.iterdir():
            if path.is_file():
                shutil.copy(path, folder)


def _shown(model: str) -> str:
    """A folder of this checkout by its path in it, so that the figures do not name somebody's machine."""
    root = HERE.resolve().parent
    return str(Path(model).resolve().relative_to(root)) if Path(model).resolve().is_relative_to(root) else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "ablation" / "vanilla"), help="what is tuned: a folder or mini")
    parser.add_argument("--output", type=Path, default=HERE / "ablation", help="where models and steps.json go")
    parser.add_argument("--work", type=Path, default=Path("ragkv-eval/block-steps"), help="data and checkpoints")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--steps", type=int, default=MEASURED[-1], help="of 8 rows each")
    parser.add_argument("--samples", type=int, default=1600, help="lines of training data")
    parser.add_argument("--questions", type=int, default=60, help="held-out questions of each kind")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--full-share", type=float, default=0.5, help="share of rows in ordinary attention")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    measured = sorted({step for step in MEASURED if step < given.steps} | {given.steps})
    tasks = {
        kind: make_task(parse_specs(task)[0], seed=given.seed, limit=given.questions, chunks=8)
        for kind, task in TASKS.items()
    }
    data = given.work / f"train-{given.seed}-{given.samples}.jsonl"
    if not data.exists():
        write_world_examples(data, samples=given.samples, passage_range=(4, 8), split="train", seed=given.seed)
    learning = {"learning_rate": given.learning_rate, "full_share": given.full_share, "warmup": 20, "batch": 8}
    configs = {
        variant: BlockTuneConfig(
            model=given.model,
            data=data,
            output=given.work / variant,
            steps=given.steps,
            gradient_accumulation=1,
            lora_rank=None,
            dtype="float32",
            reencode=variant != "no-positions",
            seed=given.seed,
            checkpoint_every=25,
            device="cpu",
            **learning,
        )
        for variant in given.variants
    }
    record = Record(
        given.output / "steps.json",
        {
            "model": _shown(given.model),
            "seed": given.seed,
            "steps": given.steps,
            "measured": measured,
            "samples": given.samples,
            "passages": [4, 8],
            "questions": given.questions,
            "chunks": 8,
            "tasks": TASKS,
            "prompt": asdict(PromptConfig()),
            "sink": "prefix",
            **learning,
        },
        fingerprint=resolve(given.model).fingerprint("float32"),
    )
    for variant, config in configs.items():
        if record.steps(variant) >= set(measured) and (given.output / variant / "ragkv.json").exists():
            print(f"{variant}: done before", file=sys.stderr)
            continue
        tune(variant, config, tasks, record, given.output / variant)


if __name__ == "__main__":
    try:
        main()
    except RagkvError as error:
        sys.exit(f"block_steps: {error}")
    except KeyboardInterrupt:
        sys.exit("block_steps: stopped; the same command continues from here.")
