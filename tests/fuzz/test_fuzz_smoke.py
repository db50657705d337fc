# SPDX-License-Identifier: Apache-2.0
"""Each fuzzer builds, takes its seeds without a finding, and goes on from them for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import fuzzers

pytestmark = pytest.mark.requires_native

SECONDS = 3.0


@pytest.mark.parametrize("fuzzer", fuzzers.FUZZERS, ids=lambda fuzzer: fuzzer.name)
def test_no_finding_at_once(fuzzer: fuzzers.Fuzzer, tmp_path: Path, in_ci: bool) -> None:
    if lacking := fuzzers.missing(fuzzer):
        if in_ci:
            pytest.fail(f"CI must have it: {lacking}", pytrace=False)
        pytest.skip(lacking)
    code = fuzzers.run(fuzzer, tmp_path, SECONDS)
    log = (tmp_path / f"{fuzzer.name}.log").read_text(errors="replace")
    assert code == 0, log[-4000:]
    units = int(log.rpartition("stat::number_of_executed_units:")[2].split()[0])
    assert units > 10, log[-4000:]
