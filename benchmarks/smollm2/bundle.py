"""Puts the adapter that `ragkv finetune block` has trained into the package, in bfloat16: 10 MB.

python benchmarks/smollm2/bundle.py build/smollm2/tuned
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ragkv.mini import smollm2_adapter_path
from ragkv.model.checkpoint import ADAPTER

SETTINGS = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules")

CHUNKS = 4
"""Chunks per question of new indexes: with 8, an earlier adapter refused far fewer questions that it should refuse."""


def main(tuned: Path) -> None:
    target = smollm2_adapter_path()
    target.mkdir(exist_ok=True)
    weights = load_file(tuned / "adapter" / ADAPTER)
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, target / ADAPTER, {"format": "pt"})
    found = json.loads((tuned / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    kept = {name: found[name] for name in SETTINGS} | {"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    kept["target_modules"] = sorted(kept["target_modules"])
    (target / "adapter_config.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    made = json.loads((tuned / "ragkv.json").read_text(encoding="utf-8"))
    recipe = {name: value for name, value in made["recipe"].items() if name not in ("data", "output", "eval_data")}
    declared = {**made, "top_k": CHUNKS, "recipe": recipe}
    (target / "ragkv.json").write_text(json.dumps(declared, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
