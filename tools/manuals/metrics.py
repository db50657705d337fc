# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/metrics.md, written from the declarations of the metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from infiniswap.control.figures import Metric
from infiniswap.device.process import metrics as device
from infiniswap.donor import metrics as donor

PATH: Final = "docs/metrics.md"
_HEAD: Final = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
_TABLE: Final = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def with_tables(text: str) -> str:
    """The document with its two tables, of a device and of a daemon, as the code has them now."""
    tables = iter([_table(device.METRICS), _table(donor.METRICS)])
    return _TABLE.sub(lambda _: next(tables), text)


def _table(metrics: Iterable[Metric[Any]]) -> str:
    return _HEAD + "".join(map(_row, metrics))


def _row(metric: Metric[Any]) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    meaning = f"{metric.help} {metric.notes}".strip()
    return f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |\n".replace("|  |", "| |")
