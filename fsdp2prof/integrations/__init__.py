"""Trainers that record themselves: one module a framework, each importing only its own.

::

    fsdp2prof.integrations.huggingface.RecorderCallback    transformers.Trainer
    fsdp2prof.integrations.lightning.RecorderCallback      lightning.pytorch.Trainer
    fsdp2prof.integrations.accelerate.recording            a loop of one's own with accelerate
    fsdp2prof.integrations.torchtitan.RecorderProfiler     torchtitan's Trainer

All of them drive :class:`fsdp2prof.Recorder` and add nothing to what it records.
"""
