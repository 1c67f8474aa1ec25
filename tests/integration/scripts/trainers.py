"""Eight training steps of two micro-batches each, driven by a framework that records itself.

torchrun --nproc-per-node 2 trainers.py FRAMEWORK RUN
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _common import BATCH, LENGTH, VOCAB, Tower, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

STEPS, ACCUMULATED = 8, 2
OPTIONS: dict[str, Any] = {"wait": 1, "warmup": 1, "active": 3}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Enough for all ranks and steps."""

    def __len__(self) -> int:
        return STEPS * ACCUMULATED * BATCH * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + LENGTH) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def shard(model: Tower) -> None:
    mesh = shard_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2_on_cpu(names: list[str]) -> Any:
    """Make accelerate take FSDP2 on a CPU, which it does for accelerators alone; returns its plugin.

    What it then does with the model and the optimizer is its own.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=names,
        cpu_ram_efficient_loading=False,
    )
    Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return plugin


def huggingface(run: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from fsdp2prof.integrations.huggingface import RecorderCallback

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        assert args.device.type == "cpu"  # starts the process group
        fsdp2_on_cpu(["LlamaDecoderLayer"])
        model = LlamaForCausalLM(config)
        trainer = Trainer(
            model=model, args=args, train_dataset=Tokens(), callbacks=[RecorderCallback(run, **OPTIONS)]
        )
        trainer.train()


def accelerate(run: str) -> None:
    from accelerate import Accelerator

    from fsdp2prof.integrations.accelerate import recording

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATED, fsdp_plugin=fsdp2_on_cpu(["Block"])
    )
    plain = Tower()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters()), DataLoader(Tokens(), batch_size=BATCH)
    )
    with recording(accelerator, run, **OPTIONS) as recorder:
        for tokens in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens["input_ids"]).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            recorder.step()
    accelerator.end_training()


def lightning(run: str) -> None:
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from fsdp2prof.integrations.lightning import RecorderCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.tower.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.tower, mesh=mesh)

        def training_step(self, tokens: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.tower(tokens["input_ids"]).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[RecorderCallback(run, **OPTIONS)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Tokens(), batch_size=BATCH))


def torchtitan(run: str) -> None:
    """What torchtitan's ``Trainer.train`` does with its profiler; the trainer itself wants an accelerator."""
    from fsdp2prof.integrations.torchtitan import RecorderProfiler

    config = RecorderProfiler.Config(output=run, options=OPTIONS)
    with process_group():
        model = Tower()
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with config.build(global_step=0, base_folder=run) as profiler:
            for _ in range(STEPS):
                for _ in range(ACCUMULATED):
                    nn.functional.gelu(model(batch())).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()


FRAMEWORKS = {one.__name__: one for one in (huggingface, accelerate, lightning, torchtitan)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("run")
    args = parser.parse_args()
    FRAMEWORKS[args.framework](args.run)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
