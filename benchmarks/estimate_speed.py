"""CPU seconds of ``estimate memory``, beside those of importing torch and of constructing the model on meta.

    python -m benchmarks.estimate_speed [MODEL ...]

Each figure is of a process of its own with one thread, the least of three, its imports included.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

MODELS = {"llama3-8b": "dp_shard=8", "llama3-405b": "dp_shard=64,tp=8", "qwen3-30b-a3b": "dp_shard=8,ep=8"}
"""Model -> the mesh that it is estimated on."""
ROUNDS = 3
IMPORT = "import torch, torch.distributed.fsdp"
CONSTRUCTION = (
    "from fsdp2prof.estimators.config.model import ModelSpec\n"
    "from fsdp2prof.estimators.models.build import build_model\n"
    "build_model(ModelSpec(source={!r}), seq_len=8192)"
)


def cpu_s(*arguments: str) -> float:
    """User and system time of a Python process, the least of :data:`ROUNDS`."""
    spent = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


def main(models: list[str]) -> None:
    """Print a row a model."""
    importing = cpu_s("-c", IMPORT)
    print(f"importing torch: {importing:.1f} CPU s")
    print(f"{'model':16}{'on meta':>9}{'estimate':>10}{'of it ours':>12}")
    for model in models or MODELS:
        built = cpu_s("-c", CONSTRUCTION.format(model))
        options = ["--model", model, "--mesh", MODELS.get(model, "dp_shard=8"), "--seq-len", "8192"]
        whole = cpu_s("-m", "fsdp2prof", "estimate", "memory", *options, "--ac", "op", "-q")
        print(f"{model:16}{built:9.1f}{whole:10.1f}{whole - built:12.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
