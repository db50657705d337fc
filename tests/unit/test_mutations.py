# SPDX-License-Identifier: Apache-2.0
"""The patches of `make mutations` (which takes too long for CI) fit the sources as they are."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest


@pytest.mark.parametrize("mutation", mutations.mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_still_applies_and_says_what_it_breaks(
    mutation: mutations.Mutation, tmp_path: Path
) -> None:
    mutations.copy_sources(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.c")}
    mutations.apply(mutation, tmp_path)
    assert [p for p, text in before.items() if p.read_bytes() != text]
    mutations.apply(mutation, tmp_path, undo=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.c")} == before
    assert mutation.why.endswith(".")
