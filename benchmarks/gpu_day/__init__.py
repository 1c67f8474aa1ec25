"""Everything worth doing on a GPU in one command: ``python -m benchmarks.gpu_day`` (``make gpu``).

``suite`` runs the GPU tests, ``recordings`` records real FSDP2 runs, ``live`` sets the lines of ``--watch``
beside the trace and provokes a hang, ``memory`` sets measured peaks of large worlds beside their estimates,
``overhead`` measures what recording costs. Each part is a list of jobs
(``day``); one that fails stops no other. ``folder`` writes what came out into one folder that tests can read.
"""
