# SPDX-License-Identifier: Apache-2.0
"""tools/monitoring: alert rules and dashboard ask for what is exported, and do what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.machine.ran import ran

from infiniswap.control.figures import Metric
from infiniswap.control.own_certificate import DEVICE, DONOR
from infiniswap.device.process import metrics as device
from infiniswap.donor import metrics as donor

DIRECTORY = Path(__file__).resolve().parents[2] / "tools" / "monitoring"
RULES = DIRECTORY / "infiniswap-alerts.yml"
TESTS = DIRECTORY / "infiniswap-alerts-test.yml"
DASHBOARD = DIRECTORY / "infiniswap-dashboard.json"
ALL: tuple[Metric[Any], ...] = (*device.METRICS, *donor.METRICS)
METRICS = {metric.name: metric for metric in ALL}
TARGET = {"job", "instance"}


def _alerts() -> list[Any]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def _queries() -> dict[str, str]:
    """Of the dashboard, by panel and letter."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }


def _expressions() -> dict[str, str]:
    return {**_queries(), **{rule["alert"]: rule["expr"] for rule in _alerts()}}


def _selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that it names, with the labels it is asked for."""
    for name, matchers in re.findall(r"(infiniswap_\w+|\bup\b)(?:{([^}]*)})?", expression):
        yield name, set(re.findall(r"(\w+)=", matchers))


def _problems(expression: str) -> list[str]:
    problems, known = [], set(TARGET)
    for name, labels in _selectors(expression):
        metric = METRICS.get(name.removesuffix("_bucket"))
        if name == "up":
            own: set[str] = set()
        elif metric is None or (metric.kind == "histogram") != name.endswith("_bucket"):
            problems.append(f"{name} is not exported")
            continue
        else:
            own = {*metric.labels, *(["device"] if metric in device.METRICS else [])}
            own |= {"le"} if metric.kind == "histogram" else set()
            if metric.kind == "counter" and name in re.sub(
                r"(rate|increase)\((infiniswap_\w+)", "", expression
            ):
                problems.append(f"{name} is a counter, to be asked for with rate or increase")
        known |= own
        if missing := labels - own - TARGET:
            problems.append(f"{name} has no label {missing}")
    for by in re.findall(r"by \(([^)]*)\)", expression):
        if missing := set(re.findall(r"\w+", by)) - known:
            problems.append(f"by {missing}: no such label")
    return problems


@pytest.mark.parametrize("expression", _expressions().values(), ids=_expressions())
def test_queries_ask_for_what_is_exported(expression: str) -> None:
    assert list(_selectors(expression))
    assert not _problems(expression)


@pytest.mark.parametrize(
    "wrong",
    [
        "infiniswap_device_nothing",
        "rate(infiniswap_device_request_duration_seconds[5m])",
        'rate(infiniswap_device_pages_in_total{reason="x"}[5m])',
        "sum by (reason) (rate(infiniswap_device_pages_in_total[5m]))",
        "infiniswap_device_pages_out_total > 0",
    ],
)
def test_the_check_of_queries_can_fail(wrong: str) -> None:
    assert _problems(wrong)


def test_legends_name_labels_of_their_queries() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if by := re.search(r"by \(([^)]*)\)", target["expr"]):
                assert legend <= set(re.findall(r"\w+", by[1])), target
            else:
                assert legend <= {"device", "instance"}, target


def _promtool(*args: str | Path) -> None:
    done = ran("promtool", *args)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.requires_tool("promtool")
def test_promtool_accepts_the_rules_and_their_tests() -> None:
    _promtool("check", "rules", "--lint-fatal", RULES)
    _promtool("test", "rules", TESTS)


def _documented(project_root: Path) -> list[str]:
    """The parts of a Prometheus configuration that docs/metrics.md shows."""
    text = (project_root / "docs" / "metrics.md").read_text()
    return re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_documented_jobs_ask_over_tls_and_know_whom_they_ask(project_root: Path) -> None:
    whole, certified = _documented(project_root)
    names = {"infiniswap-donor": DONOR.name, "infiniswap-device": DEVICE.name}
    jobs = yaml.safe_load(whole)["scrape_configs"]
    assert {job["job_name"] for job in jobs} == set(names)
    for job in jobs:
        assert job["scheme"] == "https"
        assert set(job["tls_config"]) == {"ca_file", "server_name"}  # nothing left unchecked
        assert job["tls_config"]["server_name"] == names[job["job_name"]]
        assert job["authorization"]["credentials_file"]
    assert re.findall(r"server_name: ([\w-]+)", certified) == [*names.values()]
    for line in re.findall(r"^tls_config.*", certified, re.MULTILINE):
        assert set(yaml.safe_load(line)["tls_config"]) == {
            *("ca_file", "cert_file", "key_file", "server_name")
        }


@pytest.mark.requires_tool("promtool")
def test_promtool_accepts_the_documented_configuration(project_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(_documented(project_root)[0])
    _promtool("check", "config", "--syntax-only", path)


def test_every_alert_is_made_to_fire_and_is_described(project_root: Path) -> None:
    names = {rule["alert"] for rule in _alerts()}
    fired = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == names
    text = (project_root / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(Infiniswap\w+)` \|", text, re.MULTILINE)) == names


@pytest.mark.requires_tool("promtool")
def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"query{number}", "expr": expr.replace("$__rate_interval", "5m")}
        for number, expr in enumerate(_queries().values())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert len(rules) > 20
    _promtool("check", "rules", path)
