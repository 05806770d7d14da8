"""croissant.json: what is in the data set, in MLCommons' Croissant format, for search engines and loaders.

Written from the Arrow schemas and the files themselves, as the card's YAML is: every file with its digest,
every column of every config with its type. ``mlcroissant`` reads records through it, also without network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchtraceap.dataset.checksums import sha256
from torchtraceap.dataset.schema import SPLITS

NAME = "croissant.json"

CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
"""The JSON-LD context that the specification 1.1 prescribes."""

CONFORMS_TO = "http://mlcommons.org/croissant/1.1"

_TYPES: dict[pa.DataType, str] = {
    pa.string(): "sc:Text",
    pa.bool_(): "sc:Boolean",
    pa.float32(): "cr:Float32",
    pa.float64(): "cr:Float64",
    pa.int16(): "cr:Int16",
    pa.int32(): "cr:Int32",
    pa.int64(): "cr:Int64",
    pa.uint8(): "cr:UInt8",
    pa.uint16(): "cr:UInt16",
}


def croissant(folder: Path, schemas: Mapping[str, pa.Schema], about: Mapping[str, Any]) -> str:
    """The text of croissant.json of the data set in ``folder``.

    Args:
        folder: Holds ``data/`` with all files.
        schemas: Config to the schema of its files.
        about: schema.org properties of the data set: name, description, license, version and so on.
    """
    files = {config: sorted((folder / "data").glob(f"{config}-*.parquet")) for config in schemas}
    document = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        **about,
        "distribution": [
            *(_file_object(file) for config in schemas for file in files[config]),
            *(_file_set(config) for config in schemas),
        ],
        "recordSet": [_split_names(), *(_record_set(config, schemas[config]) for config in schemas)],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _file_object(file: Path) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": f"data/{file.name}",
        "name": file.name,
        "contentUrl": f"data/{file.name}",
        "contentSize": f"{file.stat().st_size} B",
        "encodingFormat": "application/x-parquet",
        "sha256": sha256(file),
    }


def _file_set(config: str) -> dict[str, Any]:
    """The files of a config, as a pattern: contained in the folder of croissant.json, not in another file."""
    return {
        "@type": "cr:FileSet",
        "@id": f"files-{config}",
        "name": f"files-{config}",
        "description": f"All files of the config {config}.",
        "encodingFormat": "application/x-parquet",
        "includes": f"data/{config}-*.parquet",
    }


def _split_names() -> dict[str, Any]:
    """A record set that lists the splits, as the specification wants it for a split column."""
    return {
        "@type": "cr:RecordSet",
        "@id": "splits",
        "dataType": "cr:Split",
        "key": {"@id": "splits/name"},
        "name": "splits",
        "description": "The splits.",
        "field": [{"@type": "cr:Field", "@id": "splits/name", "dataType": "sc:Text", "name": "name"}],
        "data": [{"splits/name": split} for split in SPLITS],
    }


def _record_set(config: str, schema: pa.Schema) -> dict[str, Any]:
    split = {
        "@type": "cr:Field",
        "@id": f"{config}/split",
        "name": "split",
        "description": "Named by the file that the row is in.",
        "dataType": "sc:Text",
        "source": {
            "fileSet": {"@id": f"files-{config}"},
            "extract": {"fileProperty": "filename"},
            # Also matches its own outcome: mlcroissant applies it before a join and after it.
            "transform": {"regex": rf"^(?:{config}-)?({'|'.join(SPLITS)})(?:-\d.*)?$"},
        },
        "references": {"field": {"@id": "splits/name"}},
    }
    return {
        "@type": "cr:RecordSet",
        "@id": config,
        "name": config,
        "description": f"The table {config}.",
        "field": [split, *(_field(config, field) for field in schema)],
    }


def _field(config: str, field: pa.Field) -> dict[str, Any]:
    entry: dict[str, Any] = {"@type": "cr:Field", "@id": f"{config}/{field.name}", "name": field.name}
    if not pa.types.is_struct(field.type):
        return entry | _column(config, field.name, field.type)
    parts = []
    for part in field.type:
        column = _column(config, field.name, part.type)
        column["source"]["transform"] = {"jsonPath": part.name}
        name = f"{config}/{field.name}/{part.name}"
        parts.append({"@type": "cr:Field", "@id": name, "name": part.name} | column)
    return entry | {"subField": parts}


def _column(config: str, name: str, kind: pa.DataType) -> dict[str, Any]:
    is_list = pa.types.is_list(kind)
    return {
        "dataType": _TYPES[kind.value_type if is_list else kind],
        **({"isArray": True, "arrayShape": "-1"} if is_list else {}),
        "source": {"fileSet": {"@id": f"files-{config}"}, "extract": {"column": name}},
    }
