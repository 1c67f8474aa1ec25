"""The typed tables every part of the toolkit shares: columns, dtypes, units.

A recorder and an estimator are two producers of the same tables, and analyzers never know which one made
them. A table is a frozen dataclass of equally long columns: ``int64`` times in nanoseconds, ``int64``
bytes, and interned strings (:class:`Strings`); the identities of events are 32 bits wide where all fit
(:data:`CompactArray`). Nothing here computes an analysis.

========================  ================================================================================
:class:`EventTable`       one rank's Kineto events (host ops, annotations, kernels, copies)
:class:`CollectiveArgs`   the collective metadata some events carry (sparse, by event row)
:class:`StepTable`        training steps
:class:`LabelTable`       labelled host ranges (``record_function``), the raw material of phases
:class:`PhaseTable`       host time -> (step, fqn, phase, activity): the one map everything joins to
:class:`CollectiveTable`  one row per collective, attributed
:class:`AllocationTable`  one row per allocation, attributed
:class:`MemoryRecording`  one device's memory history: allocations, segments, blocks, labels, steps, stacks
:class:`ShapeTable`       recorded input shapes of the operators that need them (sparse, by event row)
:class:`MemoryEventTable` Kineto's ``[memory]`` instants
:class:`SyncTable`        what CUDA synchronisation events wait for (sparse, by event row)
:class:`Trace`            everything one trace file holds: the reader's result
========================  ================================================================================
"""
