"""`ragkv bench vllm`, in a module of its own: by now no other module's server is alive, which would need its memory."""

import json
import subprocess

from vllmserver import PYTHON


def test_the_benchmark_shows_every_figure_beside_vllms_own(models):
    command = [PYTHON, "-m", "ragkv", "bench", "vllm", "--quick", "--json", "--dtype", "float32", "--model"]
    run = subprocess.run([*command, models("llama")], stdout=subprocess.PIPE, check=True)
    rows = json.loads(run.stdout)["rows"]
    assert [row["baseline"] for row in rows] == ["vLLM's prefill"] * 2 + ["vLLM's prefix cache"] * 2
    assert all(row["value"] > 0 < row["baseline_value"] for row in rows)
