"""Kernel signatures of real traces by the name of their function."""

from __future__ import annotations

import pytest

from fsdp2prof.backends import kernel_name


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>)",
            "vectorized_elementwise_kernel",
        ),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*)",
            "cunn_SoftMaxForward",
        ),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(Params<int>)", "kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
        ("sm80_xmma_gemm_f32f32_tn_n_tilesize64x64x8", "sm80_xmma_gemm_f32f32_tn_n_tilesize64x64x8"),
        ("aten::copy_", "aten::copy_"),
        ("a < b", "a < b"),
        ("", ""),
    ],
)
def test_a_signature_is_its_function(signature: str, name: str) -> None:
    assert kernel_name(signature) == name
