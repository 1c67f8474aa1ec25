"""A configuration as the settings of the tools that run it, to paste."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.pipeline import schedule_rule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.results.plan import Recipe
from fsdp2prof.units import plural

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_WIDTH = 76
"""Columns of a command's line."""
_BESIDE = ("batch_size", "seq_len", "grad_accum", "ac", "reshard", "sync")
"""Options that a command states even at their defaults, because the search chose them."""


def recipes(request: PlanRequest, winner: Candidate) -> list[Recipe]:
    """Return the commands that estimate a configuration, and its settings for trainers."""
    common = estimate_options(request, winner)
    hardware = f"--hardware {request.cluster.hardware.name}"
    return [
        Recipe(tool="estimate memory", text=_command(f"estimate memory {common} {hardware}")),
        Recipe(tool="estimate comm", text=_command(f"estimate comm {common}")),
        Recipe(tool="estimate step", text=_command(f"estimate step {common} {hardware}{_cluster(request)}")),
        Recipe(tool="torchtitan to 0.2", text=_torchtitan(request, winner), note=_torchtitan_note(winner)),
        Recipe(
            tool="torchtitan 0.3", text=_flags(request, winner), note=_torchtitan_note(winner, newer=True)
        ),
        *_for_accelerate(request, winner),
        Recipe(tool="fully_shard", text=_fully_shard(winner)),
    ]


def estimate_options(request: PlanRequest, one: Candidate) -> str:
    """Return the options of ``estimate`` that describe a configuration."""
    options = [f"--model {request.model.source}"]
    if request.model.layers is not None:
        options.append(f"--layers {request.model.layers}")
    options.append(f"--mesh {one.mesh}")
    defaults = PolicySpec()
    for name in options_of(PolicySpec):
        value = getattr(one.policy, name)
        if value == getattr(defaults, name) and (name not in _BESIDE or name == "sync"):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else _off(name, flag))
        else:
            options.append(f"--{flag} {_text(value)}")
    return " ".join(options)


def _command(arguments: str) -> str:
    """Break a command into lines that a shell joins again."""
    lines = ["fsdp2prof"]
    for part in arguments.replace(" --", "\n--").splitlines():
        if len(lines[-1]) + 1 + len(part) > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return "\n".join(lines)


def _off(name: str, flag: str) -> str:
    return "--keep-root" if name == "reshard_root" else f"--no-{flag}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else _DTYPES.get(str(value), str(value))


def _cluster(request: PlanRequest) -> str:
    cluster = request.cluster
    parts = [f" --gpus-per-node {cluster.gpus_per_node}"]
    if cluster.network is not None:
        parts.append(f" --network {cluster.network.name}")
    if cluster.nics_per_node is not None:
        parts.append(f" --nics-per-node {cluster.nics_per_node}")
    return "".join(parts)


def _torchtitan(request: PlanRequest, one: Candidate) -> str:
    """Sections of a TOML file."""
    policy = one.policy
    mode = {"none": "none", "full": "full"}.get(str(policy.ac), "selective")
    option = "op" if policy.ac == "op" else str(policy.ac_every or "op")
    checkpointing: dict[str, object] = {"mode": mode}
    if mode == "selective":
        checkpointing["selective_ac_option"] = option
    sections = {**_titan_sections(request, one), "activation_checkpoint": checkpointing}
    lines: list[str] = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines[:-1])


def _flags(request: PlanRequest, one: Candidate) -> str:
    """Options of a command, beside --module and --config."""
    lines = [
        f"--{section}.{key} {value}"
        for section, values in _titan_sections(request, one).items()
        for key, value in values.items()
    ]
    mode = {"none": "none", "full": "full"}.get(str(one.policy.ac), "selective")
    return " \\\n".join([*lines, f"activation_checkpoint:{mode}"])


def _titan_sections(request: PlanRequest, one: Candidate) -> dict[str, dict[str, object]]:
    """Settings of every torchtitan version.

    A pipeline divides its local batch into micro-batches; without a pipeline the rest of the global batch
    is accumulated.
    """
    mesh, policy = one.mesh, one.policy
    reshard = policy.reshard if policy.reshard in ("never", "always") else "default"
    pipeline: dict[str, object] = {}
    if mesh.pp > 1:
        pipeline = {
            "pipeline_parallel_schedule": schedule_rule(policy.pp_schedule).torchtitan_name,
            "pipeline_parallel_microbatch_size": policy.batch_size,
        }
    return {
        "training": {
            "local_batch_size": policy.batch_size * (policy.grad_accum if mesh.pp > 1 else 1),
            "global_batch_size": request.global_batch,
            "seq_len": policy.seq_len,
            "mixed_precision_param": policy.compute_dtype,
            "mixed_precision_reduce": "float32",
            **({"dtype": policy.orig_dtype} if policy.orig_dtype != "float32" else {}),
            **({"enable_cpu_offload": True} if policy.offload else {}),
        },
        "parallelism": {
            "data_parallel_replicate_degree": mesh.dp_replicate,
            "data_parallel_shard_degree": mesh.dp_shard,
            "tensor_parallel_degree": mesh.tp,
            "context_parallel_degree": mesh.cp,
            "pipeline_parallel_degree": mesh.pp,
            **pipeline,
            **({"expert_parallel_degree": mesh.ep} if mesh.ep > 1 else {}),
            "fsdp_reshard_after_forward": reshard,
        },
    }


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _torchtitan_note(one: Candidate, *, newer: bool = False) -> str:
    notes = ["beside --module and --config"] if newer else []
    if newer and one.policy.ac_every is not None:
        notes.append(
            f"ac={one.policy.ac} is not a setting of torchtitan, whose selective checkpointing is by operator"
        )
    if one.policy.gradient_dtype != "float32":
        notes.append("torchtitan reduces gradients in float32")
    if isinstance(one.policy.reshard, int):
        notes.append(f"resharding to {one.policy.reshard} ranks is not a setting of torchtitan")
    if one.mesh.pp == 1 and one.policy.grad_accum > 1 and one.policy.sync == "last":
        notes.append("torchtitan reduces gradients after each micro-batch (sync=each)")
    if one.mesh.pp == 1 and one.policy.reshard == "default":
        notes.append("torchtitan shards embedding and [norm, output] as separate groups")
    return "; ".join(notes)


def _for_accelerate(request: PlanRequest, one: Candidate) -> list[Recipe]:
    """Return no settings for techniques that accelerate cannot run: pipelines and expert parallelism."""
    if one.mesh.pp > 1 or one.mesh.ep > 1:
        return []
    return [Recipe(tool="accelerate", text=_accelerate(request, one), note=_accelerate_note(one))]


def _accelerate(request: PlanRequest, one: Candidate) -> str:
    mesh, policy = one.mesh, one.policy
    host = request.cluster.hardware.host_gpus or request.cluster.gpus_per_node
    words = {True: "true", False: "false"}
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        f"mixed_precision: {_DTYPES.get(policy.compute_dtype, 'no')}",
        f"num_machines: {-(-request.gpus // host)}",
        f"num_processes: {request.gpus}",
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {words[policy.reshard != 'never']}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_activation_checkpointing: {words[policy.ac == 'full']}",
        f"  fsdp_offload_params: {words[policy.offload]}",
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {mesh.dp_replicate}",
        f"  parallelism_config_dp_shard_size: {mesh.dp_shard}",
        f"  parallelism_config_tp_size: {mesh.tp}",
        f"  parallelism_config_cp_size: {mesh.cp}",
    ]
    return "\n".join(lines)


def _accelerate_note(one: Candidate) -> str:
    policy = one.policy
    accumulated = f", gradient_accumulation_steps={policy.grad_accum}" if policy.grad_accum > 1 else ""
    notes = [f"in the script: a batch of {policy.batch_size}, {policy.seq_len} tokens{accumulated}"]
    if policy.gradient_dtype != policy.compute_dtype:
        notes.append(
            f"accelerate reduces gradients in {policy.compute_dtype} unless its plugin is given a "
            f"mixed_precision_policy with reduce_dtype={policy.gradient_dtype}"
        )
    if policy.orig_dtype != "float32":
        notes.append("accelerate keeps parameters in float32 under mixed precision")
    if one.policy.ac == "full":
        notes.append(
            "before accelerate 1.15 fsdp_activation_checkpointing checkpoints each child of a block, which "
            "saves less memory: set it to false there, and gradient_checkpointing=True in the script"
        )
    if one.policy.ac not in ("none", "full"):
        notes.append(f"ac={one.policy.ac} is not a setting of accelerate: checkpoint in the script")
    if len(one.policy.wrap) > 1:
        notes.append("accelerate shards what is outside the blocks with the root")
    return "; ".join(notes)


def _fully_shard(one: Candidate) -> str:
    mesh, policy = one.mesh, one.policy
    dims = _dimensions(mesh)
    block = {"never": "False", "default": "True", "always": "True", "torchtitan": "True"}.get(
        str(policy.reshard), str(policy.reshard)
    )
    offloading = ", CPUOffloadPolicy" if policy.offload else ""
    names = tuple(name for name in dims if name in ("dp_replicate", "dp_shard", "dp_shard_cp"))
    taken = names if len(names) > 1 else names[0]
    root = block if policy.reshard in ("always", "never") else "False"
    lines = [
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard{offloading}",
        "",
        *_mesh("mesh", dims),
        *_context_parallel(mesh),
        *_divided_first(one),
        *([f"model.to(torch.{policy.orig_dtype})"] if policy.orig_dtype != "float32" else []),
        f'policy = {{"mesh": mesh[{taken!r}], "mp_policy": MixedPrecisionPolicy(',
        f"    param_dtype=torch.{policy.compute_dtype}, reduce_dtype=torch.{policy.gradient_dtype})}}",
        *(['policy["offload_policy"] = CPUOffloadPolicy()'] if policy.offload else []),
        *_experts(one),
        "for block in blocks:",
        f"    fully_shard(block, reshard_after_forward={block}, **policy{_placed(one)})",
        *_ends(policy, block),
        f"fully_shard(model, reshard_after_forward={root}, **policy)",
    ]
    if mesh.pp == 1 and policy.grad_accum > 1 and policy.sync == "last":
        lines.append("# in the loop: model.set_requires_gradient_sync(is_last_micro_batch)")
    lines.append(
        f"# batch {policy.batch_size} x {policy.seq_len} tokens, {plural(policy.grad_accum, 'micro-batch')}, "
        f"activation checkpointing: {policy.ac}"
    )
    return "\n".join(lines)


def _dimensions(mesh: MeshSpec) -> dict[str, int]:
    """Dimensions of a device mesh, without those of one rank; the dimension that FSDP shards over is
    always included.

    Context parallelism's ranks are a part of the ranks that FSDP shards over.
    """
    sizes = mesh.sizes()
    cp = sizes.pop("cp")
    shards = "dp_shard" if cp == 1 else "dp_shard_cp"
    named = {shards if name == "dp_shard" else name: size for name, size in sizes.items()}
    named[shards] *= cp
    return {name: size for name, size in named.items() if size > 1 or name == shards}


def _mesh(variable: str, dims: Mapping[str, int], taken: str = "") -> list[str]:
    shape, names = tuple(dims.values()), tuple(dims)
    return [f"{variable} = init_device_mesh(", f'    "cuda", {shape}, mesh_dim_names={names}){taken}']


def _context_parallel(mesh: MeshSpec) -> list[str]:
    """Lines that make the groups of context parallelism."""
    if mesh.cp == 1:
        return []
    dims = {name: size for name, size in mesh.sizes().items() if size > 1}
    return [
        "# context parallelism: FSDP shards over dp_shard x cp; the ring's own groups are of another mesh",
        *_mesh("ring", dims, '["cp"]'),
    ]


def _divided_first(one: Candidate) -> list[str]:
    """Lines for the techniques that divide a model before FSDP shards it."""
    mesh, policy = one.mesh, one.policy
    lines = []
    if mesh.pp > 1:
        name = schedule_rule(policy.pp_schedule).torch_class
        lines += [
            '# pipeline: model is the stage of mesh["pp"].get_local_rank(),',
            f"# run by torch.distributed.pipelining.{name}",
            f"# with n_microbatches={policy.grad_accum}",
        ]
    if mesh.tp > 1:
        lines.append('# tensor parallelism: parallelize_module(block, mesh["tp"], plan) for every block')
    return lines


def _experts(one: Candidate) -> list[str]:
    """Lines that place experts."""
    mesh, policy = one.mesh, one.policy
    if mesh.ep > 1:
        return [
            f"# expert parallelism: {mesh.ep} ranks of dp_shard x cp hold a part of the experts each, and",
            f"# shard_placement_fn gives these parameters the mesh of the other {mesh.expert_fsdp_size}",
        ]
    if policy.expert_shards != "hidden":
        return []
    return [
        "# experts are cut along their hidden dimension: there are too few of them for the ranks",
        "placement = lambda parameter: Shard(1) if parameter.ndim == 3 else None",
    ]


def _placed(one: Candidate) -> str:
    return ", shard_placement_fn=placement" if one.mesh.ep > 1 or one.policy.expert_shards == "hidden" else ""


def _ends(policy: PolicySpec, block: str) -> list[str]:
    """Calls for modules outside the blocks; under torchtitan's rule the last of them stays gathered."""
    units = policy.wrap[1:]
    lines = []
    for unit in units:
        modules = [f"model.{name}" for name in unit.split("+")]
        what = modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"
        kept = "False" if policy.reshard == "torchtitan" and unit == units[-1] else block
        lines.append(f"fully_shard({what}, reshard_after_forward={kept}, **policy)")
    return lines
