"""Small trainings by real trainers, as their documentation writes them: ``torchrun programs.py NAME``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 12


def tiny_llama(**fields: Any) -> Any:
    """A Llama of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **fields))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, with themselves as labels."""

    def __len__(self) -> int:
        return 2 * 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def own_data() -> None:
    """Make the data that a rank draws from here on its own; until here all built the same model."""
    torch.manual_seed(1 + dist.get_rank())


def fsdp2_on_cpu() -> Any:
    """Make accelerate take FSDP2 on a CPU, which it does for accelerators alone; returns its plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return plugin


def accelerate() -> None:
    """A loop of accelerate's with FSDP2."""
    from accelerate import Accelerator

    accelerator = Accelerator(fsdp_plugin=fsdp2_on_cpu(), cpu=True)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def training_arguments(kind: Any, **more: Any) -> Any:
    """Arguments of a Hugging Face trainer on FSDP2."""
    arguments = kind(
        output_dir=mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        logging_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    assert arguments.device.type == "cpu"  # starts the process group
    fsdp2_on_cpu()
    return arguments


def trainer() -> None:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = training_arguments(TrainingArguments)
    Trainer(tiny_llama(), arguments, train_dataset=Tokens()).train()


def peft() -> None:
    """LoRA adapters on a frozen base, in the Trainer."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    arguments = training_arguments(TrainingArguments)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    Trainer(model, arguments, train_dataset=Tokens()).train()


def lightning() -> None:
    """Lightning's ModelParallelStrategy, with blocks wrapped in ``configure_model``."""
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            if hasattr(self, "model"):
                return
            self.model = tiny_llama()
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        barebones=False,
        default_root_dir=mkdtemp(),
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Tokens(), batch_size=4))


def sft() -> None:
    """TRL's SFTTrainer on token ids."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": Tokens()[index]["input_ids"].tolist()} for index in range(96)])
    arguments = training_arguments(SFTConfig, bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
    SFTTrainer(tiny_llama(), args=arguments, train_dataset=data, processing_class=tokenizer()).train()


def tokenizer() -> Any:
    """A tokenizer of 256 words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(256)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    made.pad_token = made.eos_token = "w1"
    return made


def vision() -> None:
    """transformers' ViT, wrapped by hand, in a plain loop with a DataLoader."""
    from torch.distributed.fsdp import fully_shard
    from transformers import ViTConfig, ViTForImageClassification

    dist.init_process_group("gloo")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10))
    for layer in layers_of(model, "ViTLayer"):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own_data()
    images = [(torch.randn(3, 32, 32), index % 10) for index in range(8 * STEPS)]
    for pixels, labels in torch.utils.data.DataLoader(images, batch_size=8):  # type: ignore[arg-type]
        model(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def encoder_decoder() -> None:
    """transformers' T5 with two stacks of blocks."""
    from torch.distributed.fsdp import fully_shard
    from transformers import T5Config, T5ForConditionalGeneration

    dist.init_process_group("gloo")
    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 256,
    }
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    for layer in layers_of(model, "T5Block"):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own_data()
    for _ in range(STEPS):
        tokens = torch.randint(256, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def layers_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Modules of a class, by its name."""
    return [one for one in model.modules() if type(one).__name__ == name]


def torch_transformer() -> None:
    """torch's own nn.Transformer encoder."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own_data()
    for _ in range(STEPS):
        model(torch.randn(4, 32, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mixture() -> None:
    """transformers' Mixtral, whose experts FSDP shards with their block."""
    from torch.distributed.fsdp import fully_shard
    from transformers import MixtralConfig, MixtralForCausalLM

    dist.init_process_group("gloo")
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    for layer in layers_of(model, "MixtralDecoderLayer"):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own_data()
    for _ in range(STEPS):
        tokens = torch.randint(256, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def diffusion() -> None:
    """diffusers' UNet, trained to predict noise as its training example does."""
    from diffusers import DDPMScheduler, UNet2DModel
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    for block in [*model.down_blocks, model.mid_block, *model.up_blocks]:
        fully_shard(block)
    fully_shard(model)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own_data()
    for _ in range(STEPS):
        clean, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        when = torch.randint(0, 100, (2,))
        predicted = model(noise_scheduler.add_noise(clean, noise, when), when).sample
        nn.functional.mse_loss(predicted, noise).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def torch_test() -> None:
    """The loop of torch's own FSDP2 tests, with their model: micro-batches, resharding off between them."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed._tensor.common_dtensor import (
        ModelArgs,
        Transformer,
        TransformerBlock,
    )

    dist.init_process_group("gloo")
    model = Transformer(ModelArgs(n_layers=3, dropout_p=0.0))
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module)
    root = fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own_data()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True):
            root.set_is_last_backward(last)
            root.set_requires_gradient_sync(last)
            model(torch.randint(0, 8, (2, 16))).sum().backward()
        optimizer.step()


def distillation() -> None:
    """A frozen teacher of the student's own architecture, so that their modules have the same names."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    teacher, student = tiny_llama().requires_grad_(False), tiny_llama()
    for model in (teacher, student):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    own_data()
    for _ in range(STEPS):
        tokens = torch.randint(256, (4, 32))
        with torch.no_grad():
            wanted = teacher(input_ids=tokens).logits.log_softmax(-1)
        given = student(input_ids=tokens).logits.log_softmax(-1)
        nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True).backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        accelerate,
        trainer,
        peft,
        lightning,
        sft,
        vision,
        encoder_decoder,
        torch_transformer,
        mixture,
        diffusion,
        torch_test,
        distillation,
    )
}


def main() -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
    # gloo's threads may outlive the group by a moment and abort an interpreter that is already ending.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
