"""Hypothesis strategies: schedules with any durations, policies and deviations."""

from __future__ import annotations

from hypothesis import strategies as st

from synthetic.schedule import Layer, Schedule, transformer


def names(indices: range) -> tuple[str, ...]:
    return tuple(f"layers.{i}" for i in indices)


def layer(index: int, count: int) -> st.SearchStrategy[Layer]:
    duration = st.integers(1, 1_500_000)
    late = st.one_of(st.just(0), st.integers(0, 3_000_000))
    ahead = st.integers(0, 2)
    return st.builds(
        lambda forwards, backwards, **fields: Layer(
            fqn=f"layers.{index}",
            forward_prefetch=tuple(f"layers.{i}" for i in range(index + 1, min(count, index + 1 + forwards))),
            backward_prefetch=tuple(
                f"layers.{i}" for i in range(index - 1, max(-1, index - 1 - backwards), -1)
            ),
            **fields,
        ),
        forwards=ahead,
        backwards=ahead,
        numel=st.sampled_from([4, 4_000, 4_000_000]),
        forward_ns=st.integers(3, 900_000),
        backward_ns=st.integers(3, 1_500_000),
        all_gather_ns=duration,
        reduce_scatter_ns=duration,
        all_reduce_ns=duration,
        copy_ns=st.integers(1, 30_000),
        kernels=st.integers(1, 3),
        host_ns=st.one_of(st.just(0), st.just(12_003), st.integers(0, 300_000)),
        late_ns=late,
        late_backward_ns=late,
        reshard=st.sampled_from([None, None, True, False]),
        sync=st.sampled_from([False, False, False, False, True]),
    )


def schedules() -> st.SearchStrategy[Schedule]:
    roots = st.integers(1, 4).flatmap(
        lambda count: st.tuples(*(layer(i, count) for i in range(count))).map(
            lambda c: ((transformer(1)[0], *c),)
        )
    )
    return st.builds(
        Schedule,
        roots=roots,
        steps=st.integers(1, 3),
        microbatches=st.integers(1, 3),
        sync_every_microbatch=st.booleans(),
        shard=st.sampled_from([2, 4]),
        replicas=st.sampled_from([1, 1, 2]),
        reduce_dtype=st.sampled_from(["Float", "BFloat16"]),
        unshard_async_op=st.booleans(),
        separate_reduce_scatter_group=st.booleans(),
        user_ranges=st.booleans(),
        compiled=st.booleans(),
        input_stream=st.booleans(),
        checkpoint=st.sampled_from(["none", "inside", "outside"]),
        flavour=st.sampled_from(["nccl", "rccl", "copy_engine", "symmetric_memory"]),
        labels=st.sampled_from(["host", "launch"]),
        optimizer_ns=st.integers(1, 900_000),
        input_ns=st.integers(1, 90_000),
    )
