"""A parameter group as a manifest describes it: one parameter, sharded on one mesh dimension."""

from __future__ import annotations

from fsdp2prof.manifest import MeshInfo, ParameterInfo, ParamGroupInfo

__all__ = ["sharded_group"]


def sharded_group(
    layer: str,
    shape: list[int],
    *,
    ranks: int,
    rows: int,
    device_type: str = "cuda",
    process_group: str = "0",
) -> ParamGroupInfo:
    """One ``weight`` of ``shape`` over ``ranks``; this one holds ``rows``, padded to the most of any."""
    most = -(-shape[0] // ranks)
    parameter = ParameterInfo(
        fqn=f"{layer}.weight" if layer else "weight",
        global_shape=shape,
        local_shape=[rows, *shape[1:]],
        padded_local_shape=[most, *shape[1:]],
        dtype="float32",
        placement="Shard(dim=0)",
        requires_grad=True,
    )
    return ParamGroupInfo(
        root=0,
        fqn=layer,
        index=0,
        group_count=1,
        mesh=MeshInfo(
            device_type=device_type, shape=[ranks], dim_names=["dp_shard"], dim_groups=[process_group]
        ),
        shard_group=process_group,
        reduce_scatter_group=process_group,
        all_reduce_group=None,
        post_forward_group=None,
        shard_world_size=ranks,
        replicate_world_size=1,
        param_dtype=None,
        reduce_dtype=None,
        output_dtype=None,
        reshard_after_forward=True,
        offload=False,
        offload_pin_memory=False,
        unshard_async_op=False,
        requires_grad=True,
        parameters=[parameter],
    )
