"""Collectives found, named, sized and placed on a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.traces import WORKER, TraceBuilder

from fsdp2prof.analyzers.trace.analysis import analyze_rank, merge
from fsdp2prof.analyzers.trace.collective_names import (
    dtype_name,
    is_collective_kernel,
    itemsize,
    op_of,
    wire_bytes,
)
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.manifest import (
    MeshInfo,
    ParameterInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    RankManifest,
    Rehearsal,
)
from fsdp2prof.tables.columns import Strings

AG: dict[str, Any] = {
    "collective": "_allgather_base",
    "dtype": "BFloat16",
    "in_nelems": 100,
    "out_nelems": 400,
    "group_size": 4,
    "process_group": "1",
    "process_group_desc": "mesh_dp_shard",
    "seq": 12,
    "comms_id": 1 << 61,
}


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("c10d::allreduce_", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("multimem_all_gather_kernel", "all_gather"),
        ("broadcast", "broadcast"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", None),
        ("barrier", None),
        ("void deep_ep::internode::dispatch<false, 2, false, 768, 8, 8>(int4*, float*)", "all_to_all"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 8192>(__nv_bfloat16*)", "all_to_all"),
        ("void deep_ep::internode::notify_dispatch<false, 2>(int const*, int*, int)", "all_to_all"),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(int)", "all_to_all"),
        ("userbuffers_fp16_sum_inplace_gpu_rw_ag(int, int, int)", "all_gather"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<4>(int, int)", "reduce_scatter"),
        ("kuserbuffers_pushrecv(int, int, int*, int*)", "send_recv"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>",
            "all_reduce",
        ),
        ("deep_ep::intranode::barrier<8>(int**, int)", None),
    ],
)
def test_kinds(name: str, op: str | None) -> None:
    assert op_of(name) == op


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
        "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
        "void c10d::symmetric_memory::(anonymous namespace)::multimem_all_gather_kernel<16>",
        "multimem_all_reduce_kernel",
        "void vllm::cross_device_reduce_1stage<float, 2>",
        "ncclSymkDevKernel_AllGather_LL",
        "void deep_ep::internode::dispatch<false, 2, false, 768, 8, 8>(int4*, float*)",
        "void deep_ep::internode_ll::combine<true, 3, 7168>(void*, void*, int*)",
        "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)",
        "void mscclpp::ep::intranode::combine<float, 8>(float*)",
        "nvshmemi_proxy_quiet_entrypoint",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 8, false>(AllReduceParams)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>",
        "void flashinfer::trtllm_alltoall::moeAllToAllKernel<8>(int)",
        "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)",
        "userbuffers_fp16_sum_inplace_gpu_rw(int, int, int)",
        "void c10d::nvshmem_extension::allToAllV(void*, void*, long*)",
        "oneccl_allreduce_small",
    ],
)
def test_communication_kernels(name: str) -> None:
    assert is_collective_kernel(name)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
        "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "Memcpy PtoP (Device -> Device)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8, 4>(long const*, int*)",
        "triton_poi_fused_all_reduce_wait_tensor_0",
        "",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    ],
)
def test_other_kernels(name: str) -> None:
    assert not is_collective_kernel(name)


@pytest.mark.parametrize(
    ("written", "name", "size"),
    [
        ("BFloat16", "bfloat16", 2),
        ("c10::BFloat16", "bfloat16", 2),
        ("float", "float32", 4),
        ("Float8_e4m3fn", "float8_e4m3fn", 1),
        ("long int", "int64", 8),
        ("Byte", "uint8", 1),
        ("c10::complex<float>", "complex64", 8),
        ("Bool", "bool", 1),
        ("Fancy", "fancy", -1),
    ],
)
def test_element_types(written: str, name: str, size: int) -> None:
    assert dtype_name(written) == name
    assert itemsize(name) == size


def test_wire_bytes_follow_the_bus_factors() -> None:
    ops = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast", "all_gather"]
    found = wire_bytes(Strings.intern(ops), np.full(7, 800), np.array([4, 4, 4, 4, -1, 4, -1]))
    assert found.tolist() == [600, 600, 1200, 600, 800, -1, -1]


def labelled() -> TraceBuilder:
    """One step; layers.0 gathers inside its pre-forward."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#5", 0, 1000)
    trace.label("FSDP::pre_forward (layers.0)", 10, 60)
    trace.label("FSDP::all_gather (layers.0)", 12, 40)
    trace.label("FSDP::all_gather_copy_out (layers.0)", 45, 55)
    trace.label("FSDP::post_forward (layers.0)", 200, 210)
    return trace


def only(tables: RankTables) -> dict[str, Any]:
    table = tables.collectives.table
    assert len(table) == 1
    return table.to_pandas().iloc[0].to_dict() | {"reason": tables.collectives.reason[0]}


def test_a_kernel_with_metadata_is_placed_through_its_launch() -> None:
    trace = labelled()
    trace.device("ncclDevKernel_Generic(ncclDevComm*)", 100, 180, launch=30, stream=24, **AG)
    found = only(rank_tables(trace.build()))
    expected = {
        "start_ns": 100, "end_ns": 180, "issue_ns": 30, "step": 5, "fqn": "layers.0", "phase": "forward",
        "op": "all_gather", "process_group": "1", "mesh_dim": "dp_shard", "dtype": "bfloat16",
        "group_size": 4, "payload_bytes": 800, "wire_bytes": 600, "stream": 24, "seq": 12,
        "comms_id": 1 << 61, "reason": None,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_functional_collectives_of_nccl_have_their_bytes() -> None:
    """Tensor parallelism's, as NCCL's process group describes them: the gathered and the whole input."""
    sizes = {"allgather_into_tensor_coalesced": (64, 256), "reduce_scatter_tensor_coalesced": (256, 64)}
    for collective, (given, made) in sizes.items():
        trace = labelled()
        op = collective.removesuffix("_coalesced").replace("allgather", "all_gather")
        trace.host(f"_c10d_functional::{op}", 250, 290)
        trace.host(f"c10d::{collective}_", 255, 288)
        described = AG | {"collective": collective, "in_nelems": given, "out_nelems": made}
        trace.host("record_param_comms", 256, 287, **described)
        trace.device("ncclDevKernel_Generic(ncclDevComm*)", 300, 380, launch=270)
        found = only(rank_tables(trace.build()))
        assert (found["payload_bytes"], found["wire_bytes"]) == (512, 384)
        assert (found["process_group"], found["fqn"]) == ("1", None)


def test_metadata_of_the_operator_serves_a_kernel_without() -> None:
    trace = labelled()
    trace.host("c10d::_allgather_base_", 25, 38)
    trace.host("record_param_comms", 26, 37, **AG)
    trace.device("rcclGenericKernel<1, false>", 100, 180, launch=30)
    found = only(rank_tables(trace.build()))
    assert (found["op"], found["payload_bytes"], found["process_group"]) == ("all_gather", 800, "1")


def test_a_generic_kernel_without_metadata_takes_its_kind_from_the_label() -> None:
    trace = labelled()
    trace.device("ncclDevKernel_Generic(ncclDevComm*)", 100, 180, launch=30)
    found = only(rank_tables(trace.build()))
    assert (found["op"], found["payload_bytes"], found["dtype"]) == ("all_gather", -1, None)


def test_copies_of_a_copy_engine_are_one_all_gather() -> None:
    trace = labelled()
    trace.host("record_param_comms", 20, 39, **AG)
    for launch, start, end in ((22, 100, 120), (24, 120, 150), (26, 150, 185)):
        trace.device("Memcpy PtoP (Device -> Device)", start, end, launch, 24, "gpu_memcpy")
    trace.device("Memcpy HtoD (Pinned -> Device)", 190, 195, 28, 24, "gpu_memcpy")
    tables = rank_tables(trace.build())
    found = only(tables)
    assert (found["start_ns"], found["end_ns"], found["op"], found["fqn"]) == (
        100,
        185,
        "all_gather",
        "layers.0",
    )
    assert tables.work.is_memcpy.tolist() == [True], "the host transfer is none of it"


def test_a_copy_beside_a_collective_kernel_is_no_collective() -> None:
    trace = labelled()
    trace.host("record_param_comms", 20, 39, **AG)
    trace.device("Memcpy DtoD (Device -> Device)", 90, 95, 22, 24, "gpu_memcpy")
    trace.device("ncclDevKernel_AllGather_RING_LL", 100, 180, launch=30, **AG)
    assert only(rank_tables(trace.build()))["start_ns"] == 100


def test_what_cannot_be_placed_says_why() -> None:
    trace = labelled()
    trace.label("Optimizer.step#AdamW.step", 300, 400)
    trace.device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 110, launch=None)
    trace.device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 250, 260, launch=240)
    trace.device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 360, 370, launch=350)
    tables = rank_tables(trace.build())
    assert tables.collectives.table.fqn.to_list() == [None, None, None]
    assert tables.collectives.table.phase.to_list() == ["other", "other", "optimizer"]
    assert tables.collectives.reason.to_list() == [
        "its launch is not in the file",
        "issued outside every FSDP module",
        "issued by the optimizer",
    ]


def test_without_labels_everything_but_the_layer_is_known() -> None:
    trace = TraceBuilder()
    trace.device("ncclDevKernel_AllGather_RING_LL", 100, 180, launch=30, **AG)
    found = only(rank_tables(trace.build()))
    assert (found["fqn"], found["step"], found["payload_bytes"]) == (None, 0, 800)
    assert found["reason"] == "no FSDP labels in the trace"


def gloo(**prefetch: int) -> TraceBuilder:
    """An all-gather, and a reduce-scatter that shows as an all-reduce, of layers.0 on CPU."""
    trace = labelled()
    trace.host("c10d::_allgather_base_", 15, 18, in_nelems=100, out_nelems=200, dtype="c10::BFloat16")
    trace.host("gloo:all_gather", 20, 39, "user_annotation", WORKER, in_nelems=100, dtype="c10::BFloat16")
    trace.label("FSDP::pre_backward (layers.0)", 500, 510)
    trace.label("FSDP::post_backward_reduce (layers.0)", 600, 700)
    trace.host("c10d::_reduce_scatter_base_", 610, 612, in_nelems=200, out_nelems=100, dtype="float")
    trace.host(
        "gloo:all_reduce", 620, 650, "user_annotation", WORKER, in_nelems=200, out_nelems=200, dtype="float"
    )
    trace.host("c10d::allreduce_", 655, 656, in_nelems=100, out_nelems=100)
    trace.host(
        "gloo:all_reduce",
        660,
        690,
        "user_annotation",
        WORKER + 1,
        in_nelems=100,
        out_nelems=100,
        dtype="float",
    )
    trace.label("FSDP::root_post_backward_callback", 800, 820)
    return trace


def test_gloo_ranges_take_their_meaning_from_the_operator() -> None:
    table = rank_tables(gloo().build()).collectives.table
    assert table.op.to_list() == ["all_gather", "reduce_scatter", "all_reduce"]
    assert table.phase.to_list() == ["forward", "backward", "backward"]
    assert table.fqn.to_list() == ["layers.0"] * 3
    assert table.dtype.to_list() == ["bfloat16", "float32", "float32"]
    assert table.payload_bytes.tolist() == [400, 800, 400]
    assert table.group_size.tolist() == [2, 2, -1]
    assert table.wire_bytes.tolist() == [200, 400, -1]
    assert table.issue_ns.tolist() == [15, 610, 655]
    assert table.start_ns.tolist() == [20, 620, 660]


def param_group(fqn: str, numel: int, shard: str, index: int = 0, groups: int = 1) -> ParamGroupInfo:
    parameter = ParameterInfo(
        fqn=f"{fqn}.weight", global_shape=[2 * numel], local_shape=[numel], padded_local_shape=[numel],
        dtype="float32", placement="Shard(0)", requires_grad=True,
        all_gather_dtypes=["bfloat16"], all_gather_numels=[numel],
    )  # fmt: skip
    return ParamGroupInfo(
        root=0, fqn=fqn, index=index, group_count=groups,
        mesh=MeshInfo(device_type="cpu", shape=[2, 2], dim_names=["dp_replicate", "dp_shard"]),
        shard_group=shard, reduce_scatter_group=shard, all_reduce_group="7", post_forward_group=None,
        shard_world_size=2, replicate_world_size=2, param_dtype="bfloat16", reduce_dtype="float32",
        output_dtype=None, reshard_after_forward=True, offload=False, offload_pin_memory=False,
        unshard_async_op=False, requires_grad=True, parameters=[parameter],
    )  # fmt: skip


GROUPS = [
    ProcessGroupInfo(
        name="7", desc="mesh_dp_replicate", backend="gloo", ranks=[0, 2], mesh_dim="dp_replicate"
    ),
    ProcessGroupInfo(name="8", desc="mesh_dp_shard", backend="gloo", ranks=[0, 1], mesh_dim="dp_shard"),
    ProcessGroupInfo(name="9", desc="mesh_ep", backend="gloo", ranks=[0, 3], mesh_dim="ep"),
]


def test_the_manifest_knows_gloos_process_groups() -> None:
    manifest = RankManifest(process_groups=GROUPS, param_groups=[param_group("layers.0", 100, "8")])
    table = rank_tables(gloo().build(), manifest).collectives.table
    assert table.process_group.to_list() == ["8", "8", "7"]
    assert table.mesh_dim.to_list() == ["dp_shard", "dp_shard", "dp_replicate"]
    assert table.wire_bytes.tolist() == [200, 400, 400]


def test_several_groups_of_a_module_are_told_apart_by_their_bytes() -> None:
    manifest = RankManifest(
        process_groups=GROUPS,
        param_groups=[param_group("layers.0", 100, "8", 0, 2), param_group("layers.0", 64, "9", 1, 2)],
    )
    table = rank_tables(gloo().build(), manifest).collectives.table
    assert table.process_group.to_list() == ["8", "8", "7"]


def test_a_group_that_cannot_be_told_is_null() -> None:
    trace = gloo()
    trace.process_groups = tuple(GROUPS)
    table = rank_tables(trace.build()).collectives.table
    assert table.process_group.to_list() == [None, None, None], "three groups have two ranks"
    trace.process_groups = tuple(GROUPS[1:2])
    table = rank_tables(trace.build()).collectives.table
    assert table.process_group.to_list() == ["8", "8", "8"], "there is no other"
    assert table.wire_bytes.tolist() == [200, 400, 400]


def test_gloo_work_issued_before_the_recording_is_not_given_to_a_later_operator() -> None:
    trace = gloo()
    trace.host("gloo:all_gather", 2, 14, "user_annotation", WORKER, in_nelems=100, dtype="c10::BFloat16")
    tables = rank_tables(trace.build())
    assert tables.collectives.table.issue_ns.tolist() == [-1, 15, 610, 655]
    assert tables.collectives.table.op.to_list()[0] == "all_gather"
    assert tables.collectives.reason[0] == "its launch is not in the file"
    assert tables.warnings == []


def test_gloo_without_recorded_shapes_pairs_in_order() -> None:
    trace = labelled()
    for start, op in ((15, "_allgather_base_"), (20, "_allgather_base_"), (25, "_reduce_scatter_base_")):
        trace.host(f"c10d::{op}", start, start + 1)
    trace.host("gloo:all_gather", 16, 30, "user_annotation", WORKER)
    trace.host("gloo:all_gather", 30, 36, "user_annotation", WORKER)
    table = rank_tables(trace.build()).collectives.table
    assert table.issue_ns.tolist() == [15, 20]
    assert table.payload_bytes.tolist() == [-1, -1]
    assert rank_tables(trace.build()).warnings == [
        "hand.json: 1 collectives were issued without a recorded transfer"
    ]


def test_a_collective_of_another_step_is_not_counted_in_a_chosen_one() -> None:
    trace = TraceBuilder()
    for step in (1, 2, 3):
        trace.label(f"ProfilerStep#{step}", 100 * step, 100 * step + 100)
        trace.device("gemm", 100 * step + 10, 100 * step + 20, launch=100 * step + 5)
        trace.device("ncclDevKernel_AllGather", 100 * step + 90, 100 * step + 130, 100 * step + 50, 24, **AG)
    trace.device("ncclDevKernel_AllGather", 60, 150, 90, 24, **AG)
    built = trace.build()
    assert rank_tables(built).collectives.table.step.tolist() == [1, 1, 2, 3]
    assert rank_tables(built, chosen=[2]).collectives.table.step.tolist() == [-1, -1, 2, -1]
    assert rank_tables(built, window="trace").collectives.table.step.tolist() == [0, 0, 0, 0]


def test_gloo_ranges_may_carry_fsdps_own_names() -> None:
    trace = labelled()
    trace.host("c10d::_allgather_base_", 15, 18, in_nelems=100, out_nelems=200, dtype="c10::BFloat16")
    trace.label("FSDP::all_gather (layers.0)", 20, 39, WORKER)
    trace.label("FSDP::pre_backward (layers.0)", 500, 510)
    trace.label("FSDP::post_backward_reduce (layers.0)", 600, 700)
    trace.host("c10d::_reduce_scatter_base_", 610, 612, in_nelems=200, out_nelems=100, dtype="float")
    trace.label("FSDP::reduce_scatter (layers.0)", 620, 650, WORKER)
    trace.host("c10d::allreduce_", 655, 656, in_nelems=100, out_nelems=100, dtype="float")
    trace.label("FSDP::all_reduce (layers.0)", 660, 690, WORKER + 1)
    trace.label("FSDP::root_post_backward_callback", 800, 820)
    trace.host("aten::mul", 100, 110)
    tables = rank_tables(trace.build())
    table = tables.collectives.table
    assert table.op.to_list() == ["all_gather", "reduce_scatter", "all_reduce"]
    assert table.start_ns.tolist() == [20, 620, 660]
    assert table.issue_ns.tolist() == [15, 610, 655]
    assert table.payload_bytes.tolist() == [400, 800, 400]
    assert table.phase.to_list() == ["forward", "backward", "backward"]
    assert set(tables.phases.thread.tolist()) == {0}
    assert tables.phases.fqn.lookup(tables.work.phase_row).to_list() == ["layers.0"]


def test_without_recorded_shapes_the_manifest_knows_the_bytes() -> None:
    trace = labelled()
    trace.host("c10d::_allgather_base_", 15, 18)
    trace.host("gloo:all_gather", 20, 39, "user_annotation", WORKER)
    trace.label("FSDP::pre_backward (layers.0)", 500, 510)
    trace.label("FSDP::post_backward_reduce (layers.0)", 600, 700)
    trace.host("c10d::_reduce_scatter_base_", 610, 612)
    trace.host("gloo:all_reduce", 620, 650, "user_annotation", WORKER)
    trace.label("FSDP::root_post_backward_callback", 800, 820)
    manifest = RankManifest(process_groups=GROUPS, param_groups=[param_group("layers.0", 100, "8")])
    table = rank_tables(trace.build(), manifest).collectives.table
    assert table.payload_bytes.tolist() == [2 * 100 * 2, 2 * 100 * 4]
    assert table.dtype.to_list() == ["bfloat16", "float32"]
    assert table.wire_bytes.tolist() == [200, 400]
    several = [param_group("layers.0", 100, "8", 0, 2), param_group("layers.0", 64, "8", 1, 2)]
    manifest = RankManifest(process_groups=GROUPS, param_groups=several)
    table = rank_tables(trace.build(), manifest).collectives.table
    assert table.payload_bytes.tolist() == [-1, -1], "either group's: not guessed"
    assert table.process_group.to_list() == ["8", "8"]


def test_a_graphs_collectives_have_no_layer_of_their_own() -> None:
    trace = labelled()
    trace.host("cudaGraphLaunch", 300, 310, "cuda_runtime")
    trace.rows[-1]["correlation"] = 77
    trace.device("ncclDevKernel_AllGather_RING_LL", 320, 330, None)
    trace.rows[-1]["correlation"] = 77
    tables = rank_tables(trace.build())
    assert tables.collectives.table.issue_ns.tolist() == [300]
    assert tables.collectives.reason.to_list() == ["launched by a CUDA graph, which records no labels"]


def test_host_collectives_beside_a_device_are_named() -> None:
    trace = labelled()
    trace.device("gemm", 100, 180, launch=30)
    trace.host("gloo:barrier", 200, 210, "user_annotation", WORKER)
    assert rank_tables(trace.build()).warnings == [
        "hand.json: 1 collectives ran on the host (gloo); the device breakdown excludes them"
    ]


def test_the_users_own_collective_in_a_module_is_not_its_parameter_groups() -> None:
    trace = labelled()
    trace.host("c10d::allreduce_", 100, 102, in_nelems=10, out_nelems=10, dtype="float")
    trace.host(
        "gloo:all_reduce", 110, 120, "user_annotation", WORKER, in_nelems=10, out_nelems=10, dtype="float"
    )
    manifest = RankManifest(process_groups=GROUPS, param_groups=[param_group("layers.0", 100, "8")])
    found = only(rank_tables(trace.build(), manifest))
    assert (found["fqn"], found["op"], found["payload_bytes"]) == ("layers.0", "all_reduce", 40)
    assert found["process_group"] is None


def test_the_range_around_an_old_kernel_knows_its_tensors() -> None:
    trace = TraceBuilder()
    trace.host("c10d::allreduce_", 10, 40)
    trace.host("record_param_comms", 12, 38)
    trace.host(
        "nccl:all_reduce", 15, 35, "user_annotation", in_nelems=394_241, out_nelems=394_241, dtype="float"
    )
    trace.device("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 50, 90, launch=20)
    found = only(rank_tables(trace.build()))
    assert (found["op"], found["payload_bytes"], found["dtype"]) == ("all_reduce", 4 * 394_241, "float32")


def moe_trace(*aside: tuple[str, int, int]) -> TraceBuilder:
    """A step computes on stream 7 while DeepEP exchanges on stream 20, with kernels ``aside``."""
    trace = TraceBuilder()
    trace.label("ProfilerStep#0", 0, 1_000)
    trace.host("aten::mm", 5, 20)
    trace.device("gemm", 100, 500, launch=10)
    trace.device("void deep_ep::internode::dispatch<false, 2>(int4*)", 200, 300, launch=30, stream=20)
    trace.device("void deep_ep::internode::combine<false, 2>(int4*)", 480, 580, launch=40, stream=20)
    for name, start, end in aside:
        trace.device(name, start, end, launch=50, stream=20)
    return trace


def test_expert_parallel_kernels_are_communication_of_unknown_size() -> None:
    analysis = merge([analyze_rank(moe_trace().build())])
    (rank,) = analysis.ranks
    assert (rank.communication.total_ns, rank.communication.exposed_ns) == (200, 80)
    (row,) = analysis.groups
    assert (row.op, row.count) == ("all_to_all", 2)
    assert (row.payload_bytes, row.wire_bytes, row.busbw_bytes_per_s) == (None, None, None)
    assert analysis.bandwidth == []


def test_unknown_kernels_beside_communication_only_are_named() -> None:
    tables = rank_tables(moe_trace(("void shiny::exchange<8>(int)", 310, 350)).build())
    (warning,) = tables.warnings
    assert warning == (
        "hand.json: 1 kernel on communication stream 20 is counted as compute: exchange (40 ns)"
    )


def test_known_kernels_beside_communication_are_not_suspected() -> None:
    copy = "void at::native::vectorized_elementwise_kernel<4, float>(int)"
    both = moe_trace(("void shiny::exchange<8>(int)", 310, 350), (copy, 360, 370))
    assert rank_tables(both.build()).warnings == []
    assert rank_tables(moe_trace().build()).warnings == []


def test_a_rehearsed_list_of_tensors_is_named_by_what_is_around_it() -> None:
    """Of operators in each other one counts; on tensors without data a functional operator stands alone."""
    trace = labelled()
    for start in (15, 16):
        trace.host("c10d::allreduce_", start, 40 - start, in_nelems=128, out_nelems=128)
    trace.host("_c10d_functional::all_reduce", 14, 30, in_nelems=128, out_nelems=128, dtype="float")
    trace.host("c10d::allreduce_", 510, 515, in_nelems=2, out_nelems=2)
    trace.host("fake:all_reduce", 505, 520, in_nelems=2, out_nelems=2, dtype="double")
    for start, end in ((600, 640), (605, 630)):
        trace.host("_c10d_functional::all_reduce", start, end, in_nelems=7, out_nelems=7, dtype="float")
    manifest = RankManifest(rehearsal=Rehearsal(world_size=4, rank=0))
    table = rank_tables(trace.build(), manifest).collectives.table
    assert table.op.to_list() == ["all_reduce"] * 3
    assert table.payload_bytes.tolist() == [128 * 4, 2 * 8, 7 * 4]


def tensor_parallel() -> TraceBuilder:
    """FSDP's gathers on two gloo threads, and DTensor's functional collectives on two others."""
    trace = labelled()
    begin = 15
    for worker in (WORKER, WORKER + 1):
        trace.host("c10d::_allgather_base_", begin, begin + 1, in_nelems=100, out_nelems=200, dtype="float")
        trace.host("gloo:all_gather", begin + 2, begin + 4, "user_annotation", worker, in_nelems=100)
        begin += 10
    begin = 70
    for op, large, small in (("allgather_into_tensor", 1, 0), ("reduce_scatter_tensor", 0, 1)):
        sizes: dict[str, Any] = {"in_nelems": (64, 128)[small], "out_nelems": (64, 128)[large]}
        trace.host(f"c10d::{op}_coalesced_", begin, begin + 1, dtype="float", **sizes)
        title = "gloo:all_gather" if large else "gloo:all_reduce"
        seen = sizes if large else {"in_nelems": 128, "out_nelems": 128}
        trace.host(title, begin + 2, begin + 4, "user_annotation", WORKER + 2, **seen)
        begin += 10
    trace.host("c10d::allreduce_", begin, begin + 1, in_nelems=32, out_nelems=32, dtype="float")
    trace.host(
        "gloo:all_reduce", begin + 2, begin + 4, "user_annotation", WORKER + 2, in_nelems=32, out_nelems=32
    )
    return trace


def test_collectives_of_tensor_parallelism_on_gloo_have_group_and_wire_bytes() -> None:
    """Both groups have two ranks: gloo's threads, each of one group, tell them apart.

    128 floats gathered or scattered over two ranks send 256 bytes; 32 all-reduced send 128.
    """
    groups = [
        ProcessGroupInfo(name="8", desc="mesh_dp_shard", backend="gloo", ranks=[0, 2], mesh_dim="dp_shard"),
        ProcessGroupInfo(name="5", desc="mesh_tp", backend="gloo", ranks=[0, 1]),
    ]
    manifest = RankManifest(process_groups=groups, param_groups=[param_group("layers.0", 100, "8")])
    table = rank_tables(tensor_parallel().build(), manifest).collectives.table
    assert table.op.to_list()[2:] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert table.process_group.to_list()[2:] == ["5", "5", "5"]
    assert table.mesh_dim.to_list()[2:] == ["tp", "tp", "tp"]
    assert table.payload_bytes.tolist()[2:] == [512, 512, 128]
    assert table.wire_bytes.tolist()[2:] == [256, 256, 128]
