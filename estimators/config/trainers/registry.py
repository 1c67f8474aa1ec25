"""torchtitan's Python registries of 2026, read without running them.

A registry is a module of functions, each of which returns ``Trainer.Config(...)``. The syntax tree is
evaluated as far as it is literal: arguments, attributes that are assigned later, and a function that starts
from another. Computed values are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from fsdp2prof.errors import ModelError

_MODEL_FOLDER = re.compile(r"^(llama3|llama4|qwen3(?!_5)|deepseek_v3|gpt_oss)(?=_|$)")
"""Folders, and what functions start with; ``qwen3_5`` is another model."""
_REGISTRY = "model_registry"
_MODES = {
    "selectiveac": ("selective", "op"),
    "fullac": ("full", None),
    "memorybudgetac": ("memory_budget", None),
}
_OF_MODELS = ("attn_backend", "moe_comm_backend", "num_mtp_layers", "tp_gemm_backend")
"""Arguments of ``model_registry`` besides a model's size and converters."""
_LINEAR = (("MXFP8", "quantize.linear.mx"), ("Float8", "quantize.linear.float8"))


class _Computed:
    """Stands where a value is not literal."""


def is_registry(text: str) -> bool:
    """Whether a Python file returns configurations of torchtitan."""
    return "Trainer.Config(" in text or ("Config(" in text and "model_registry(" in text)


def parse_registry(text: str, path: PurePath, function: str | None) -> dict[str, Any]:
    """Return the configuration that one function returns, keyed like a TOML file of torchtitan.

    Raises ``ModelError`` for a file that does not parse, and if the function is missing or not named.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    made = [
        name
        for name, node in functions.items()
        if not name.startswith("_") and any(isinstance(one, ast.Return) for one in node.body)
    ]
    if function is None and len(made) == 1:
        function = made[0]
    if function not in functions:
        said = "holds several configurations" if function is None else f"has no function {function!r}"
        raise ModelError(f"{path} {said}: write {path}:NAME, one of {', '.join(made)}")
    config = _returned(functions[function], functions, ())
    if not isinstance(config, dict):
        raise ModelError(f"{path}: {function} does not return a configuration that can be read statically")
    made_by = str(config.get("_made", "Config"))
    if not made_by.endswith("Config"):
        raise ModelError(f"{path}: {function} starts from {made_by}, which the file does not define")
    own, of_file = _imported(functions[function]), _imported(tree)
    return _as_toml(config, [*own, path.parent.name, function, *(of_file if len(of_file) == 1 else ())])


def _imported(node: ast.AST) -> set[str]:
    """Folders from which a function or a module imports the models' registry."""
    return {
        (one.module or "").rpartition(".")[2]
        for one in ast.walk(node)
        if isinstance(one, ast.ImportFrom) and any(name.name == _REGISTRY for name in one.names)
    } - {""}


def _returned(
    node: ast.FunctionDef,
    functions: dict[str, ast.FunctionDef],
    running: tuple[str, ...],
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Value that a function returns for ``given`` arguments; ``running`` are those being evaluated."""
    names: dict[str, Any] = dict(given)

    def value_of(item: ast.expr | None) -> Any:
        if isinstance(item, ast.Constant):
            return item.value
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub):
            inner = value_of(item.operand)
            return -inner if isinstance(inner, int | float) else _Computed()
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mult):
            left, right = value_of(item.left), value_of(item.right)
            both = isinstance(left, int | float) and isinstance(right, int | float)
            return left * right if both else _Computed()
        if isinstance(item, ast.List | ast.Tuple):
            return [value_of(one) for one in item.elts]
        if isinstance(item, ast.Dict):
            pairs = zip(item.keys, item.values, strict=True)
            return {key.value: value_of(one) for key, one in pairs if isinstance(key, ast.Constant)}
        if isinstance(item, ast.Name):
            return names.get(item.id, _Computed())
        if isinstance(item, ast.Call):
            return called(item)
        return _Computed()

    def called(item: ast.Call) -> Any:
        name = ast.unparse(item.func)
        keywords = {one.arg: value_of(one.value) for one in item.keywords if one.arg is not None}
        values = [value_of(one) for one in item.args]
        if name not in functions or name in running:
            return {"_made": name, "_args": values, **keywords}
        takes = functions[name].args
        named = [one.arg for one in (*takes.posonlyargs, *takes.args)]
        usual: list[tuple[str, ast.expr | None]] = [*zip(named[::-1], takes.defaults[::-1], strict=False)]
        usual += [
            (one.arg, default) for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        ]
        given = {one: value_of(default) for one, default in usual}
        return _returned(
            functions[name],
            functions,
            (*running, name),
            given | dict(zip(named, values, strict=False)) | keywords,
        )

    for statement in node.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            _assign(names, statement.targets[0], value_of(statement.value))
        elif isinstance(statement, ast.Return):
            return value_of(statement.value)
    return None


def _assign(names: dict[str, Any], target: ast.expr, value: Any) -> None:
    """``config.training.seq_len = 4096``: into the tables that stand for the objects."""
    path: list[str] = []
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    if not isinstance(target, ast.Name):
        return
    if not path:
        names[target.id] = value
        return
    table = names.get(target.id)
    for name in path[:-1]:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table[path[-1]] = value


def _as_toml(config: dict[str, Any], places: Sequence[str]) -> dict[str, Any]:
    """The tables of a registry under the names that TOML files had; a place names the family."""
    found = {name: value for name, value in config.items() if not name.startswith("_")}
    spec = found.pop("model_spec", None)
    spec = spec if isinstance(spec, dict) else {}
    flavor = [*spec.get("_args", ()), spec.get("flavor")][0]
    family = next(filter(None, map(_MODEL_FOLDER.match, places)), None)
    if isinstance(flavor, str):
        named = {name: spec[name] for name in _OF_MODELS if name in spec}
        found["model"] = {"name": family[1] if family else None, "flavor": flavor, **named}
    older = found.pop("model_converters", None) or found.pop("quantization", None)
    found |= _converters(older or spec, found, "tensorwise" if older else "rowwise")
    ac = found.get("activation_checkpoint")
    if isinstance(ac, dict):
        mode, option = _MODES.get(ac.get("_made", "").split(".")[0].lower(), (None, None))
        if mode is not None:
            found["activation_checkpoint"] = {
                "mode": mode,
                **({"selective_ac_option": option} if option else {}),
            }
    elif "activation_checkpoint" in found and ac is None:
        found["activation_checkpoint"] = {"mode": "none"}
    optimizer = found.get("optimizer")
    if isinstance(optimizer, dict) and "InBackward" in optimizer.get("_made", ""):
        optimizer["early_step_in_backward"] = True
    if isinstance(optimizer, dict):
        optimizer |= _optimizer_name(optimizer)
    loss = found.get("loss")
    if isinstance(loss, dict):
        found["loss"] = {"num_chunks": loss.get("num_chunks", 8) if "Chunk" in loss.get("_made", "") else 0}
    return {
        name: _without_computed(value) for name, value in found.items() if not isinstance(value, _Computed)
    }


def _optimizer_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizers that groups of parameters name; ``default_adamw`` makes one group of all."""
    groups = optimizer.pop("param_groups", None)
    found = (
        [one.get("optimizer_name") for one in groups if isinstance(one, dict)]
        if isinstance(groups, list)
        else []
    )
    words = {one for one in found if isinstance(one, str)}
    if optimizer.get("_made", "").endswith("default_adamw"):
        words.add("AdamW")
    return {"name": "+".join(sorted(words))} if words else {}


def _converters(container: Any, found: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Converters of a model, under their names in TOML files; ``recipe`` is the float8 recipe if no name
    is given."""
    converters = container.get("converters") if isinstance(container, dict) else None
    named, tables = [], {}
    for one in converters if isinstance(converters, list) else ():
        kind = str(one.get("_made", "")).removesuffix(".Config") if isinstance(one, dict) else ""
        name = next((name for part, name in _LINEAR if part in kind and "Experts" not in kind), kind)
        named.append(name)
        tables[name] = {"recipe_name": recipe} if name.endswith("float8") else {}
        tables[name] |= {key: value for key, value in one.items() if not key.startswith("_")}
    if not named:
        return {}
    model = {**found.get("model", {}), "converters": named}
    section = {name.rpartition(".")[2]: table for name, table in tables.items() if "." in name}
    return {"model": model} | ({"quantize": {"linear": section}} if section else {})


def _without_computed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_computed(one)
            for key, one in value.items()
            if not str(key).startswith("_") and not isinstance(one, _Computed)
        }
    return [_without_computed(one) for one in value] if isinstance(value, list) else value
