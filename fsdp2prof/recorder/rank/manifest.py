"""The manifest of a rank while it is recorded: what is known of it so far, and its file."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fsdp2prof.files import write_json
from fsdp2prof.manifest import RankManifest
from fsdp2prof.recorder import devices
from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.model import describe, ownership
from fsdp2prof.recorder.model.members import unseen_by_modes
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.rank.host import machine_info
from fsdp2prof.recorder.rank.stepping import OptimizerWatch
from fsdp2prof.recorder.settings import VARIABLE, Settings, is_selected, relevant_environment
from fsdp2prof.run_directory import MANIFEST_FILE, rank_folder


def running_recorder(settings: Settings, rank: int) -> int | None:
    """Return the process of this run, if it is there yet, that has left the rank's manifest on this host."""
    try:
        found = json.loads((settings.path / rank_folder(rank) / MANIFEST_FILE).read_bytes())
        pid, host = int(found["pid"]), found["host"]
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ValueError, LookupError, TypeError):
        return None
    is_of_run = f"{VARIABLE}={os.environ.get(VARIABLE)}".encode() in environment.split(b"\0")
    return pid if is_of_run and host == socket.gethostname() and pid != os.getpid() else None


class ManifestFile:
    """A rank's folder, its manifest, and where the facts in it come from."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        roots: Roots,
        watch: OptimizerWatch,
        *,
        settled: bool = False,
    ) -> None:
        self.folder = settings.path / rank_folder(identity.rank)
        self.manifest = RankManifest(
            rank=identity.rank,
            local_rank=identity.local_rank,
            world_size=identity.world_size,
            node_rank=settings.node_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            script=list(sys.argv),
            selected=bool(is_selected(settings.options.ranks, identity.rank, identity.world_size)),
            versions=devices.package_versions(),
            environment=relevant_environment(),
            rehearsal=settings.rehearsal,
        )
        self._verify = settings.options.verify
        self._settled = settled
        self._roots = roots
        self._watch = watch

    @property
    def path(self) -> Path:
        """Of the manifest."""
        return self.folder / MANIFEST_FILE

    @property
    def device_type(self) -> str:
        """Type of the device the model is sharded on."""
        groups = self.manifest.param_groups
        groups = groups or guard.run("description", describe.describe_param_groups, self._roots)
        if groups:
            return groups[0].mesh.device_type
        return "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]

    def tell(self, message: str) -> None:
        """Keep a message for the person who reads the run."""
        if message not in self.manifest.messages:
            self.manifest.messages.append(message)

    def write(self) -> None:
        """Write the manifest as it is, or say once that it cannot be written."""
        guard.run("manifest", write_json, self.path, self.manifest)

    @unseen_by_modes()
    def describe(self) -> None:
        """Fill in FSDP's structures and write; before the first forward there is nothing to tell."""
        groups = describe.describe_param_groups(self._roots)
        if groups:
            optimizers = self._watch.optimizers if self._settled else []
            ownership.add_ownership(groups, self._roots, optimizers)
            self.manifest.unsharded = ownership.describe_unsharded(self._roots, optimizers)
            ownership.keep_told(groups, self.manifest.param_groups)
            self.manifest.param_groups = groups
            self.manifest.inputs = [list(root.inputs) for root in self._roots]
            self.manifest.reused_inputs = [list(root.reused) for root in self._roots]
            self.manifest.padding = [root.padding.share for root in self._roots]
            self.manifest.labels = [root.labels for root in self._roots]
            self.manifest.norms = describe.describe_norms(self._roots)
            self.manifest.process_groups = describe.describe_process_groups(groups)
        self.manifest.optimizers = describe.describe_optimizers(self._watch.optimizers)
        self.manifest.machine = machine_info()
        self.manifest.device = devices.device_info(self.device_type)
        self.manifest.allocator = devices.allocator_stats(self.device_type)
        self.manifest.allocator_settings |= devices.allocator_settings(self.device_type)
        self.manifest.attention_backends = devices.attention_backends(self.device_type)
        self.manifest.compiled_modules = describe.compiled_modules(self._roots)
        self.write()

    @unseen_by_modes()
    def describe_first(self) -> None:
        """As :meth:`describe`, with checksums of replicas: after the first step, on all ranks alike."""
        self.describe()
        if self.manifest.rehearsal is None:
            ownership.add_checksums(self.manifest.param_groups, self._roots, all_bytes=self._verify)
            self.write()

    def describe_settled(self) -> None:
        """As :meth:`describe`, and who updates what: after the second step every optimizer has stepped."""
        self._settled = True
        self.describe()

    @unseen_by_modes()
    def describe_tensors(self, address: Callable[[torch.Tensor], int]) -> None:
        """Add the storages of known role that are alive now."""
        known = {(tensor.address, tensor.category): tensor for tensor in self.manifest.tensors}
        for tensor in describe.describe_tensors(self._roots, self._watch.optimizers, address):
            known[tensor.address, tensor.category] = tensor
        self.manifest.tensors = list(known.values())
        self.manifest.tensors_are_all = True
