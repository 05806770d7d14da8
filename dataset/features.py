"""The YAML of the dataset card that tells `datasets` which configs, splits, files and features there are.

Written from the Arrow schemas and the files themselves, so that the card cannot disagree with the data.
Without it, `datasets` would merge all configs into one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchtraceap.dataset.schema import SPLITS
from torchtraceap.errors import UserError


def shard_path(config: str, split: str, index: int = 0, count: int = 1) -> Path:
    """Where shard ``index`` of ``count`` lies in the dataset's folder."""
    return Path("data") / f"{config}-{split}-{index:05d}-of-{count:05d}.parquet"


def card_yaml(folder: str | Path, schemas: Mapping[str, pa.Schema], default: str = "traces") -> str:
    """The keys ``configs`` and ``dataset_info`` of the card of the dataset in ``folder``.

    Splits and configs without rows are left out: `datasets` streams an empty split but fails to load it, and
    everything else of its config with it ("corresponds to no data").

    Args:
        folder: Holds the files that :func:`shard_path` names; their rows and bytes go into the card, where
            `datasets` compares them with what it has read.
        schemas: Config to the schema of all its files.
        default: The config of ``load_dataset(folder)`` without a name.

    Returns:
        Lines to put between the ``---`` of README.md, beside the other keys.

    Raises:
        UserError: A config has no file, the default one no row, or shards are missing or left over from
            another build.
    """
    configs: list[dict[str, Any]] = []
    infos: list[dict[str, Any]] = []
    for config, schema in schemas.items():
        found = {split: _shards(Path(folder), config, split) for split in SPLITS}
        sizes = {split: _size(files) for split, files in found.items()}
        splits = [split for split in SPLITS if sizes[split]["num_examples"]]
        if not any(found.values()):
            raise UserError(f"{folder} holds no file of the config {config}")
        if not splits and config == default:
            raise UserError(f"{folder} holds no row of the config {config}, which the card needs")
        if not splits:
            continue
        entry: dict[str, Any] = {"config_name": config}
        if config == default:
            entry["default"] = True
        entry["data_files"] = [
            {"split": split, "path": f"data/{config}-{split}-*.parquet"} for split in splits
        ]
        configs.append(entry)
        infos.append(
            {
                "config_name": config,
                "features": _features(schema),
                "splits": [{"name": split, **sizes[split]} for split in splits],
                "download_size": sum(file.stat().st_size for split in splits for file in found[split]),
                "dataset_size": sum(sizes[split]["num_bytes"] for split in splits),
            }
        )
    return yaml.safe_dump({"configs": configs, "dataset_info": infos}, sort_keys=False, allow_unicode=True)


def _shards(folder: Path, config: str, split: str) -> list[Path]:
    files = sorted((folder / "data").glob(f"{config}-{split}-*.parquet"))
    expected = [folder / shard_path(config, split, index, len(files)) for index in range(len(files))]
    if files != expected:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{folder}/data does not hold exactly the shards of one build: {names}")
    return files


def _size(files: list[Path]) -> dict[str, int]:
    """Bytes, uncompressed, and rows."""
    metadata = [pq.read_metadata(file) for file in files]
    groups = (data.row_group(index) for data in metadata for index in range(data.num_row_groups))
    return {
        "num_bytes": sum(group.total_byte_size for group in groups),
        "num_examples": sum(data.num_rows for data in metadata),
    }


def _features(fields: Iterable[pa.Field]) -> list[dict[str, Any]]:
    return [{"name": field.name, **_feature(field.type)} for field in fields]


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"struct": _features(kind)}
    if pa.types.is_list(kind):
        # `list`, as `sequence` of a struct means something else to `datasets`.
        inner = _feature(kind.value_type)
        return {"list": inner.get("dtype") or inner.get("struct") or inner}
    return {"dtype": _DTYPES.get(kind, str(kind))}


_DTYPES = {pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"}
