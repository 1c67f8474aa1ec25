"""Kernel names and operator inputs show which compute another setting would speed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.sharded_groups import sharded_group

from fsdp2prof.analyzers.trace.kernel_kinds import has_logits, kinds_of_compute, makes_gradient
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.backends import KERNEL_KINDS, KERNEL_PATTERNS, moves_memory
from fsdp2prof.manifest import LabelsInfo, RankManifest
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

US = 1.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "fmha_cutlassB_f32_aligned_128x64_k128_sm80(AttentionBackwardKernel::Params)",
            "attention_in_float32",
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(AttentionKernel::Params)", None),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, float>(int)", "layout"),
        ("void cudnn::ops::nhwcToNchwKernel<__nv_bfloat16, float>(int)", "layout"),
        ("batched_transpose_64x64_pack_2x2_ediv_2x2_half.kd", "layout"),
        (
            "void at::native::(anonymous namespace)::indexing_backward_kernel_small_stride<float>(int)",
            "indexed",
        ),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(P)", "unaligned"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_nt_align2>(P)", "unaligned"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_nt_align8>(P)", None),
        ("cutlass_80_simt_sgemm_128x128_8x5_nn_align1", "float32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_32x32_16x5_tn_align1>(P)", "float64"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", None),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str | None) -> None:
    assert [one for one, pattern in KERNEL_PATTERNS.items() if pattern.search(name)] == (
        [] if kind is None else [kind]
    )
    assert not moves_memory(name)


class Timeline:
    """A trace of one thread and one stream: operators that each launch a kernel, in labels of FSDP2."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.device, self.correlation = 1000.0, 1000.0, 1

    def label(self, name: str) -> None:
        self._host(name, "user_annotation", 2.0)

    def operator(self, name: str, dims: list[list[int]], kernel: str, took: float) -> None:
        self._host(name, "cpu_op", 10.0, {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)})
        launched = self.now - 5.0
        self.events.append(
            self._event("cudaLaunchKernel", "cuda_runtime", launched, 2.0, {"correlation": self.correlation})
        )
        start = max(self.device, launched + 3.0)
        self.events.append(
            self._event(kernel, "kernel", start, took, {"correlation": self.correlation, "stream": 7}, tid=7)
        )
        self.device = start + took
        self.correlation += 1

    def _host(self, name: str, category: str, took: float, args: dict[str, Any] | None = None) -> None:
        self.events.append(self._event(name, category, self.now, took, args or {}))
        self.now += took + 1.0

    def _event(
        self, name: str, category: str, at: float, took: float, args: dict[str, Any], tid: int = 1
    ) -> dict[str, Any]:
        of_device = {"device": 0} if category == "kernel" else {}
        return {
            "ph": "X", "name": name, "cat": category, "ts": at, "dur": took, "pid": 0 if tid == 7 else 5,
            "tid": tid, "args": {**args, **of_device},
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        path.write_text(
            json.dumps(
                {
                    "schemaVersion": 1,
                    "deviceProperties": [
                        {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 << 30}
                    ],
                    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
                    "traceEvents": self.events,
                }
            )
        )
        return path


BATCH, HEADS, TOKENS, WIDTH = 4, 16, 512, 64
PRODUCT, ELEMENTWISE = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "void at::native::elementwise_kernel<4>()",
)


def attention_of(timeline: Timeline, *, tokens: int, product: str = "aten::bmm") -> None:
    """Forward and backward of one attention: scores, scale, softmax, values, and a projection after it."""
    rows, keys, scores = (
        [BATCH * HEADS, tokens, WIDTH],
        [BATCH * HEADS, WIDTH, tokens],
        [BATCH * HEADS, tokens, tokens],
    )
    pairs = [BATCH, HEADS, tokens, tokens]
    timeline.operator(product, [rows, keys], PRODUCT, 50.0)
    timeline.operator("aten::mul", [pairs], ELEMENTWISE, 100.0)
    timeline.operator("aten::_softmax", [pairs], "void softmax_warp_forward<float>()", 100.0)
    timeline.operator(product, [scores, rows], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[BATCH * tokens, 1024], [1024, 1024]], PRODUCT, 30.0)
    timeline.operator(product, [scores, rows], PRODUCT, 50.0)
    timeline.operator(product, [rows, keys], PRODUCT, 50.0)
    timeline.operator("aten::_softmax_backward_data", [pairs], "void cunn_SoftMaxBackward<float>()", 100.0)
    timeline.operator("aten::mul", [pairs], ELEMENTWISE, 100.0)
    timeline.operator(product, [scores, rows], PRODUCT, 50.0)
    timeline.operator(product, [scores, rows], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[BATCH * tokens, 1024], [1024, 1024]], PRODUCT, 30.0)


def spent_on_scores(
    timeline: Timeline, tmp_path: Path, name: str = "attention_scores"
) -> tuple[float, float]:
    """Milliseconds of attention without a fused kernel in the ledger, and what its remedy gains."""
    found = analyze_trace(open_job(timeline.write(tmp_path / "trace.json")), workers=1)
    assert found.ledger is not None
    entry = next((one for one in found.ledger.entries if one.id == name), None)
    if entry is None or entry.remedy is None or entry.remedy.gain_ns is None:
        return 0.0, 0.0
    return entry.ns / 1e6, entry.remedy.gain_ns / 1e6


def test_attention_without_a_fused_kernel_is_what_lies_between_its_products(tmp_path: Path) -> None:
    timeline = Timeline()
    for _ in range(6):
        attention_of(timeline, tokens=TOKENS)
    spent, gain = spent_on_scores(timeline, tmp_path)
    assert spent == pytest.approx(6 * 0.7, rel=1e-3)
    assert gain == pytest.approx(spent * 2 / 3, rel=0.05)


def test_attention_that_averages_its_weights_returns_them(tmp_path: Path) -> None:
    timeline = Timeline()
    for _ in range(6):
        attention_of(timeline, tokens=TOKENS)
        pairs = [BATCH, HEADS, TOKENS, TOKENS]
        timeline.operator("aten::mean", [pairs], "void reduce_kernel<512>()", 20.0)
    spent, gain = spent_on_scores(timeline, tmp_path, "attention_weights")
    assert spent == pytest.approx(6 * 0.7, rel=1e-3)
    assert gain == pytest.approx(spent / 2, rel=0.05)
    assert spent_on_scores(timeline, tmp_path) == (0.0, 0.0)


def test_a_softmax_over_few_keys_is_no_attention(tmp_path: Path) -> None:
    timeline = Timeline()
    for _ in range(6):
        attention_of(timeline, tokens=32)
    assert spent_on_scores(timeline, tmp_path) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("factors", "makes"),
    [
        ([(768, 320), (320, 256)], True),  # gradients times activations
        ([(256, 320), (320, 768)], True),
        ([(320, 768), (768, 256)], False),  # the gradient of the activations
        ([(768, 8), (8, 256)], False),  # an adapter's two matrices
        ([(320, 256), (256, 768)], False),  # forward, computed again
        ([(768, 320), (320, 8)], False),
        ([(2, 768, 320), (2, 320, 256)], False),
        ([(768, 320)], False),
    ],
)
def test_a_frozen_matrix_has_a_gradient_if_a_product_has_its_shape(
    factors: list[tuple[int, ...]], makes: bool
) -> None:
    assert makes_gradient(factors, {(768, 256)}, {(768, 8), (8, 256)}) is makes


@pytest.mark.parametrize(
    ("dims", "logits"),
    [
        ("[[510,64],[64,1000]]", True),
        ("[[1000,510],[510,64]]", True),  # the gradient of the head
        ("[[510,1000],[1000,64]]", True),
        ("[[2,256,1000],[],[]]", True),  # the last position of each sample has no label
        ("[[510,64],[64,256]]", False),
        ("[[2000,1000]]", False),
        ("[[1000,64],[510]]", False),
    ],
)
def test_logits_are_known_by_their_size(dims: str, logits: bool) -> None:
    assert has_logits(frozenset({(510, 1000)}), dims) is logits


def kinds(timeline: Timeline, manifest: RankManifest, path: Path) -> list[str | None]:
    """Kind of each kernel, in the order of launch."""
    tables = rank_tables(read_trace(timeline.write(path), workers=1), manifest)
    found = kinds_of_compute(tables, tables.work)
    return [None if kind < 0 else KERNEL_KINDS[kind] for kind in found[np.argsort(tables.work.launch_ns)]]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (LabelsInfo(positions=512, ignored_frac=0.8), True),
        (LabelsInfo(positions=2560, ignored_frac=0.8), False),  # the loss has those with a label alone
        (LabelsInfo(positions=512, ignored_frac=0.2), False),
        (None, False),
    ],
)
def test_logits_count_where_most_labels_are_ignored(
    labels: LabelsInfo | None, named: bool, tmp_path: Path
) -> None:
    timeline = Timeline()
    timeline.operator("aten::mm", [[512, 64], [64, 1000]], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[512, 64], [64, 64]], PRODUCT, 50.0)
    timeline.operator("aten::_log_softmax", [[510, 1000]], ELEMENTWISE, 50.0)
    timeline.operator("aten::nll_loss_forward", [[510, 1000], [510]], ELEMENTWISE, 50.0)
    timeline.operator("aten::mm", [[1000, 510], [510, 64]], PRODUCT, 50.0)
    found = kinds(timeline, RankManifest(labels=[labels]), tmp_path / "trace.json")
    assert ["ignored" if kind == "ignored" else None for kind in found] == (
        ["ignored", None, "ignored", "ignored", "ignored"] if named else [None] * 5
    )


@pytest.mark.parametrize("trains", [True, False])
def test_gradients_of_frozen_matrices_are_products_of_backward(trains: bool, tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.label("FSDP::pre_forward (layers.0)")
    timeline.operator("aten::mm", [[64, 8], [8, 48]], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[512, 48], [48, 64]], PRODUCT, 50.0)
    timeline.label("FSDP::pre_backward (layers.0)")
    timeline.operator("aten::mm", [[512, 64], [64, 48]], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[64, 512], [512, 48]], PRODUCT, 50.0)
    timeline.label("FSDP::post_backward (layers.0)")
    group = sharded_group("layers.0", [64, 48], ranks=2, rows=32)
    frozen = msgspec.structs.replace(group.parameters[0], requires_grad=trains)
    adapter = msgspec.structs.replace(group.parameters[0], global_shape=[64, 8])
    manifest = RankManifest(param_groups=[msgspec.structs.replace(group, parameters=[frozen, adapter])])
    found = kinds(timeline, manifest, tmp_path / "trace.json")
    assert found == [None] * 3 + [None if trains else "frozen_gradient"]


@pytest.mark.parametrize(
    ("tokens", "scores", "named"),
    [
        ([256] * 4, [256, 4], True),
        ([200, 30, 26, 256], [256, 4], False),  # an expert may have all tokens, but not each of them
        ([256] * 4, [256, 8], False),  # another router
    ],
    ids=["all", "its own", "other experts"],
)
def test_experts_that_compute_all_tokens(
    tokens: list[int], scores: list[int], named: bool, tmp_path: Path
) -> None:
    """A router of 256 tokens chooses 2 of 4 experts; attention's weights have the experts' shape."""
    timeline = Timeline()
    timeline.label("FSDP::pre_forward (layers.0)")
    for _ in "qkv":
        timeline.operator("aten::mm", [[256, 64], [64, 64]], PRODUCT, 50.0)
    timeline.operator("aten::mm", [[256, 64], [64, 4]], PRODUCT, 5.0)
    timeline.operator("aten::topk", [scores], ELEMENTWISE, 5.0)
    for own in tokens:
        timeline.operator("aten::mm", [[own, 64], [64, 64]], PRODUCT, 50.0)
        timeline.operator("aten::relu", [[own, 64]], ELEMENTWISE, 5.0)
        timeline.operator("aten::mm", [[own, 64], [64, 64]], PRODUCT, 50.0)
    timeline.label("FSDP::pre_backward (layers.0)")
    timeline.operator("aten::scatter_", [scores, [], [scores[0], 2], [scores[0], 2]], ELEMENTWISE, 5.0)
    for own in tokens:
        timeline.operator("aten::mm", [[64, own], [own, 64]], PRODUCT, 50.0)
    timeline.label("FSDP::post_backward (layers.0)")
    group = sharded_group("layers.0", [64, 64], ranks=2, rows=32)
    of_experts = [f"experts.{number}.{name}" for number in range(4) for name in ("up", "down")]
    weights = ["q", "k", "v", *of_experts]
    parameters = [msgspec.structs.replace(group.parameters[0], fqn=f"layers.0.{name}") for name in weights]
    manifest = RankManifest(param_groups=[msgspec.structs.replace(group, parameters=parameters)])
    found = kinds(timeline, manifest, tmp_path / "trace.json")
    assert found.count("all_experts") == (16 if named else 0)


def test_a_weight_of_all_experts_is_one_batch_of_products(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.label("FSDP::pre_forward (layers.0)")
    timeline.operator("aten::topk", [[256, 4]], ELEMENTWISE, 5.0)
    timeline.operator("aten::bmm", [[4, 256, 64], [4, 64, 48]], PRODUCT, 50.0)
    timeline.label("FSDP::pre_backward (layers.0)")
    timeline.operator("aten::scatter_", [[256, 4], [], [256, 1], [256, 1]], ELEMENTWISE, 5.0)
    timeline.operator("aten::bmm", [[4, 256, 48], [4, 48, 64]], PRODUCT, 50.0)
    timeline.label("FSDP::post_backward (layers.0)")
    manifest = RankManifest(param_groups=[sharded_group("layers.0", [4, 64, 48], ranks=2, rows=2)])
    assert kinds(timeline, manifest, tmp_path / "trace.json").count("all_experts") == 2


def test_every_kind_has_a_word() -> None:
    from fsdp2prof.analyzers.ledger.book import _REASONS

    assert set(KERNEL_KINDS) <= set(_REASONS)
