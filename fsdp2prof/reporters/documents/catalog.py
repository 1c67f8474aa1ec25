"""Documents of the catalogs: models, accelerators and networks, words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.catalog import CategoryCatalog, HardwareCatalog, ModelCatalog

_MATRIX_DTYPES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


@builds(ModelCatalog)
def model_catalog_document(catalog: ModelCatalog) -> Document:
    """List the known models."""
    columns = [
        c.text("name", "model"),
        c.number("parameters", "parameters\n10^9", lambda value: f"{value / 1e9:,.2f}"),
        c.count("layers"),
        c.count("dim"),
        c.count("heads"),
        c.count("kv_heads", "KV\nheads"),
        c.count("ffn_dim", "FFN"),
        c.count("vocab_size", "vocabulary"),
        c.count("context"),
        c.text("tied", "", lambda tied: "tied" if tied else ""),
        c.text("family"),
    ]
    table = c.table(
        "shapes",
        "Shapes of the built-in models",
        columns,
        catalog.models,
        note="tied: head and embedding share one parameter",
        noun="model",
    )
    lines = [
        f"Built in: {', '.join(one.name for one in catalog.models)}.",
        f"With transformers installed also: {', '.join(catalog.by_transformers)}.",
        "Their Hugging Face ids are known, too; any other id is looked up in the Hugging Face cache here.",
    ]
    return Document(
        title="Known models",
        sections=[
            Section(anchor="models", title="Models", blocks=[Sentences(title="Models", lines=lines)]),
            Section(anchor=table.name, title=table.title, blocks=[table], detail=True),
        ],
    )


@builds(HardwareCatalog)
def hardware_catalog_document(catalog: HardwareCatalog) -> Document:
    """List accelerators and networks."""
    columns = [
        c.text("name", "accelerator"),
        c.sized("memory_bytes", "memory"),
        c.number("memory_bytes_per_s", "memory\nGB/s", _whole_gb_per_s),
        c.number("link_bytes_per_s", "link\nGB/s", _whole_gb_per_s),
        *(
            c.number(dtype, f"{label}\nTFLOP/s", _tflops, of=_rate_of(dtype))
            for dtype, label in _MATRIX_DTYPES.items()
        ),
        c.text("achieved", "reached", lambda achieved: "published" if achieved else "assumed"),
        c.prose("aliases", "also", of=lambda one: ", ".join(one.aliases)),
    ]
    networks = [
        c.text("name", "network"),
        c.gb_per_s("bytes_per_s", "GB/s\na NIC"),
        c.percent("achieved_frac", "reached\n%"),
    ]
    note = "peaks; reached: share that large matrix products reach, published or assumed"
    tables = [
        c.table("accelerators", "Accelerators", columns, catalog.accelerators, note=note, whole=True),
        c.table("networks", "Networks", networks, catalog.networks, whole=True),
    ]
    known = [*catalog.accelerators, *catalog.networks]
    sources = c.table("sources", "Sources", [c.text("name"), c.prose("source")], known)
    document = _document("Hardware", tables)
    detail = Section(anchor="sources", title="Sources", blocks=[sources], detail=True)
    return replace(document, sections=[*document.sections, detail])


def _rate_of(dtype: str) -> Callable[[Any], float | None]:
    return lambda accelerator: accelerator.flops.get(dtype)


@builds(CategoryCatalog)
def category_catalog_document(catalog: CategoryCatalog) -> Document:
    """List the words of the toolkit."""
    columns = [c.text("concept"), c.text("word"), c.prose("label")]
    note = "columns and keys by concept"
    table = c.table("words", "Words", columns, catalog.words, note=note, noun="word")
    return _document("Categories", [table])


def _document(title: str, tables: list[Table]) -> Document:
    sections = [Section(anchor=table.name, title=table.title, blocks=[table]) for table in tables]
    return Document(title=title, sections=sections)


def _whole_gb_per_s(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.0f}"


def _tflops(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e12:,.0f}"
