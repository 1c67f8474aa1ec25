"""A recorded policy as options: whatever FSDP2 was told comes back the same, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.inputs import make_spec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.estimators.execution.training import shard
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.of_run.policy import norm_of_run, values_of_run
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.manifest import DeviceInfo, OptimizerInfo, ParamGroupInfo, RankManifest
from fsdp2prof.recorder.model.describe import describe_param_groups
from fsdp2prof.recorder.model.ownership import describe_unsharded
from fsdp2prof.recorder.model.roots import Roots

MESH = MeshSpec(dp_shard=4)
UNITS = (("emb",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm", "head"))
DTYPES = st.sampled_from([None, torch.bfloat16, torch.float32])
RESHARD = st.sampled_from([True, False, 2])


class Part(nn.Module):
    """Parameters that nothing computes with: any mixture of dtypes runs."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in zip(("weight", "bias"), shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nothing but FSDP's hooks."""
        return hidden


class Tower(nn.Module):
    """Embedding, three layers, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = Part((9, 8))
        self.layers = nn.ModuleList(Part((8, 8), (8,)) for _ in range(3))
        self.norm = Part((8,), (8,))
        self.head = Part((9, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run every part."""
        for part in (self.emb, *self.layers, self.norm, self.head):
            hidden = part(hidden)
        return hidden


def model_of(module: nn.Module) -> Model:
    return Model(
        name="tower",
        module=module,
        blocks=("layers.0", "layers.1", "layers.2"),
        config=None,
        make_batch=lambda *_: Batch(),
        loss=lambda *_: torch.zeros(()),
    )


def recorded(wrap: Callable[[Any, Any], None]) -> RankManifest:
    """What the recorder tells of a tower that ``wrap`` shards over four ranks."""
    roots = Roots(lambda: None)
    with fake_process_group(MESH) as mesh:
        model: Any = Tower()
        wrap(model, fsdp_mesh(mesh))
        for module in model.modules():
            if hasattr(module, "unshard"):
                roots.watch(module)
        with torch.no_grad():
            model(torch.zeros(2, 8))
        groups = describe_param_groups(roots)
        return RankManifest(
            world_size=4,
            device=DeviceInfo(type="cpu"),
            param_groups=groups,
            unsharded=describe_unsharded(roots, []),
            versions={"torch": torch.__version__},
        )


def told(group: ParamGroupInfo) -> tuple[object, ...]:
    """What a group was told, without the names of process groups and addresses."""
    parameters = [(one.fqn, one.dtype, one.requires_grad, one.padded_local_shape) for one in group.parameters]
    return (
        group.fqn,
        group.reshard_after_forward,
        group.param_dtype,
        group.reduce_dtype,
        group.output_dtype,
        group.forward_prefetch,
        group.backward_prefetch,
        group.unshard_in_backward,
        parameters,
    )


def again(manifest: RankManifest) -> RankManifest:
    """Shard the same tower as the policy that was read says."""
    values = values_of_run(manifest)
    spec = make_spec({**values, "model": "support:none"})

    def wrap(model: Any, mesh: Any) -> None:
        shard(model_of(model), spec.policy, mesh, None)

    return recorded(wrap)


@st.composite
def policies(draw: Any) -> Callable[[Any, Any], None]:
    """Any wrapping, resharding, precision, prefetching and freezing of the tower."""
    units = [unit for unit in UNITS if draw(st.booleans())]
    told = [
        (
            draw(RESHARD),
            MixedPrecisionPolicy(
                param_dtype=draw(DTYPES), reduce_dtype=draw(DTYPES), output_dtype=draw(DTYPES)
            ),
        )
        for _ in units
    ]
    root = draw(RESHARD), MixedPrecisionPolicy(param_dtype=draw(DTYPES), reduce_dtype=draw(DTYPES))
    prefetch = draw(st.lists(st.tuples(st.sampled_from(range(5)), st.booleans()), max_size=3))
    not_again = draw(st.sets(st.sampled_from(range(5))))
    frozen = draw(st.sampled_from([(), ("emb.weight",), ("layers.0.weight", "layers.1.bias")]))

    def wrap(model: Any, mesh: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        modules: list[Any] = []
        for unit, (reshard, precision) in zip(units, told, strict=True):
            parts = [model.get_submodule(fqn) for fqn in unit]
            modules.append(parts[0])
            fully_shard(
                parts if len(parts) > 1 else parts[0],
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=precision,
            )
        fully_shard(model, mesh=mesh, reshard_after_forward=root[0], mp_policy=root[1])
        for index, module in enumerate(modules):
            module.set_unshard_in_backward(index not in not_again)
        for index, forward in prefetch:
            if index + 1 < len(modules):
                one, other = modules[index], modules[index + 1]
                if forward:
                    one.set_modules_to_forward_prefetch([other])
                else:
                    other.set_modules_to_backward_prefetch([one])

    return wrap


def _is_refused(manifest: RankManifest) -> bool:
    try:
        values_of_run(manifest)
    except ModelError:
        return True
    return False


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(policies())
def test_whatever_was_told_comes_back_the_same_or_is_refused(wrap: Callable[[Any, Any], None]) -> None:
    manifest = recorded(wrap)
    if _is_refused(manifest):
        return
    assert list(map(told, again(manifest).param_groups)) == list(map(told, manifest.param_groups))


def torchtitan(model: Any, mesh: Any) -> None:
    """Embedding and blocks reshard, norm with head does not."""
    fully_shard(model.emb, mesh=mesh, reshard_after_forward=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def test_todays_torchtitan_is_read_as_it_is() -> None:
    policy = values_of_run(recorded(torchtitan))["policy"]
    assert policy["wrap"] == ("emb", "layers.0", "layers.1", "layers.2", "norm+head")
    spec = make_spec({"model": "support:none", "policy": policy})
    assert str(spec.policy.reshard) == "always,norm+head=never"
    assert spec.policy.torch == torch_rules().version


def _ignoring(model: Any, mesh: Any) -> None:
    fully_shard(model, mesh=mesh, ignored_params={model.emb.weight})


def _keeping(model: Any, mesh: Any) -> None:
    root: Any = fully_shard(model, mesh=mesh)
    root.set_reshard_after_backward(False)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (_ignoring, "ignored_params.*emb.weight"),
        (_keeping, r"set_reshard_after_backward\(False\) on the root"),
    ],
)
def test_what_no_option_says_is_refused_by_its_name(wrap: Any, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        values_of_run(recorded(wrap))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"group_count": 2}, "shard_placement_fn"),
        ({"shard_group": None}, r"replicate\(\)"),
        ({"all_gather_comm": "SymmMemAllGather"}, "communication buffers of emb by SymmMemAllGather"),
        ({"unshard_async_op": True}, "_set_unshard_async_op"),
        ({"cast_forward_inputs": False}, "cast_forward_inputs"),
        ({"root": 1}, "2 root modules that share_comm_ctx joins"),
        ({"root": 1, "comm_context": 1}, "2 root modules, which"),
    ],
)
def test_what_a_manifest_alone_can_say_is_refused_by_its_name(change: dict[str, Any], name: str) -> None:
    manifest = recorded(torchtitan)
    for field, value in change.items():
        setattr(manifest.param_groups[0], field, value)
    with pytest.raises(ModelError, match=name):
        values_of_run(manifest)


def test_an_optimizer_for_each_parameter_is_refused_by_name() -> None:
    """As an optimizer in backward, and torchao's on the host, are recorded; two halves are one to memory."""
    manifest = recorded(torchtitan)
    one = OptimizerInfo(class_name="AdamW", state_bytes=0, param_groups=1, parameters=1)
    manifest.optimizers = [one, one]
    with pytest.raises(ModelError, match=r"a separate optimizer for each parameter \(in backward"):
        values_of_run(manifest)
    half = OptimizerInfo(class_name="AdamW", state_bytes=0, param_groups=1, parameters=6)
    manifest.optimizers = [half, half]
    assert values_of_run(manifest)["policy"]["optimizer"] == "adamw"


def test_a_divide_factor_changes_nothing() -> None:
    manifest = recorded(torchtitan)
    before = values_of_run(manifest)
    manifest.param_groups[0].gradient_divide_factor = 1.0
    assert values_of_run(manifest) == before


def test_software_of_a_run_on_gpus() -> None:
    manifest = recorded(torchtitan)
    manifest.device = DeviceInfo(type="cuda")
    manifest.versions = {"torch": "2.6.0+cu124"}
    manifest.attention_backends = ["cudnn", "flash"]
    manifest.allocator_settings = {"backend": "native", "expandable_segments": "False"}
    manifest.compiled_modules = ["layers.0"]
    policy = values_of_run(manifest)["policy"]
    assert {
        name: policy[name] for name in ("torch", "attention", "allocator", "record_streams", "compile")
    } == {
        "torch": "2.6",
        "attention": "cudnn",
        "allocator": "classic",
        "record_streams": True,
        "compile": True,
    }
    manifest.environment = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert values_of_run(manifest)["policy"]["record_streams"] is False
    manifest.versions = {"torch": "2.8.0"}
    assert "record_streams" not in values_of_run(manifest)["policy"]
    assert replace(PolicySpec(), torch="2.8").records_streams is False


@pytest.mark.parametrize(
    ("norms", "version", "norm"),
    [
        (["torch.nn.modules.normalization.RMSNorm"], "2.13.0+cu130", "fused"),
        (["torch.nn.modules.normalization.RMSNorm"], "2.8.0", "composed"),
        (
            ["torch.nn.modules.normalization.LayerNorm", "torchtitan.models.norms.RMSNorm"],
            "2.13.0",
            "composed",
        ),
        (["liger_kernel.transformers.rms_norm.LigerRMSNorm"], "2.8.0", "fused"),
        (["transformers.models.llama.modeling_llama.LlamaRMSNorm"], "2.13.0", "composed"),
        (["my.RMSNorm"], "2.13.0", None),
        (["my.RMSNorm", "apex.normalization.fused_layer_norm.FusedRMSNorm"], "2.13.0", None),
        (["torch.nn.modules.normalization.LayerNorm"], "2.13.0", None),
        ([], "2.13.0", None),
    ],
)
def test_how_a_run_s_norms_were_computed(norms: list[str], version: str, norm: str | None) -> None:
    assert norm_of_run(RankManifest(norms=norms, versions={"torch": version})) == norm
