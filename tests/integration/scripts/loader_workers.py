"""Training fed by DataLoader workers, forked and spawned, that look for a recorder in themselves."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from _common import LENGTH, VOCAB, Tower, arguments, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset[torch.Tensor]):
    """Random tokens; a worker leaves a note about itself when asked for the first item."""

    def __init__(self, length: int, folder: Path) -> None:
        self.length = length
        self.folder = folder

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            note = {
                "session_module": "fsdp2prof.recorder.rank.session" in sys.modules,
                "excepthook": "recorder" in getattr(sys.excepthook, "__module__", ""),
                "wakeup_fd": signal.set_wakeup_fd(-1),
            }
            (self.folder / f"worker-{os.getpid()}.json").write_text(json.dumps(note))
        return torch.randint(VOCAB, (LENGTH,))


def main() -> None:
    args = arguments()
    with process_group() as device:
        model = Tower().to(device)
        fully_shard(model, mesh=shard_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for context in ("fork", "spawn"):
            data = Tokens(args.steps, Path(os.environ["NOTES"]))
            for tokens in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=context):
                model(tokens.to(device)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
