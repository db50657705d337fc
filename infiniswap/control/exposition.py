# SPDX-License-Identifier: Apache-2.0
"""Figures in Prometheus' text format, by its own library.

Each page is made from figures of one moment and a registry of its own: nothing is kept between two
scrapes, and the library's process-wide registry is not used.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from infiniswap.control.figures import Figures, Histogram

_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class _Snapshot(Collector):
    """Collects one moment's figures."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Every declared metric, also one without a value."""
        figures = self._figures
        common = tuple(figures.common.values())
        for metric in figures.metrics:
            labels = (*figures.common, *metric.labels)
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
            for own, value in figures.values.get(metric.name, {}).items():
                if isinstance(value, Histogram):
                    family.add_metric((*common, *own), list(value.buckets), value.sum_s)
                else:
                    family.add_metric((*common, *own), value)
            yield family


def page(figures: Figures) -> bytes:
    """The whole page, of content type figures.PAGE_TYPE."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(figures))
    return generate_latest(registry)
