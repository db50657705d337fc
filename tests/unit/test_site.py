# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a complaint, is whole, and needs no network."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from support.machine.ran import ran

ROOT = Path(__file__).resolve().parents[2]

_FETCHED = re.compile(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')
_LIST_AFTER_TEXT = re.compile(r"<p>[^<]*\n[-*] ")


_WITHOUT = """
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.rpartition(".")[2] in missing or name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
at = sys.argv.index("--")
missing, site = set(sys.argv[1:at]), sys.argv[at + 1]
sys.meta_path.insert(0, Finder())
sys.argv = ["mkdocs", "--quiet", "build", "--strict", "--site-dir", site]
runpy.run_module("mkdocs", run_name="__main__")
"""


def build(*args: str) -> None:
    env = {"PYTHONPATH": "tools", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = ran(sys.executable, *args, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    build("-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(made))
    return made


def test_every_document_is_a_page_that_fetches_nothing(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) > 40
    for source in sources:
        page = site / (source.parent / "index" if source.stem == "README" else source)
        text = page.with_name(page.name.removesuffix(".md") + ".html").read_text(encoding="utf-8")
        fetched = [first or second for first, second in _FETCHED.findall(text)]
        assert fetched
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], source
        assert "```" not in re.sub(r"<code>.*?</code>", "", text, flags=re.DOTALL), source
        assert not _LIST_AFTER_TEXT.search(text), f"{source}: a list needs an empty line before it"


def test_pages_are_made_with_what_the_extra_docs_names_alone(tmp_path: Path) -> None:
    """No C library, no aiohttp: whoever corrects a page needs neither."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    docs = extras.pop("docs")
    others = {*project["dependencies"], *(line for extra in extras.values() for line in extra)}
    names = {re.split("[<>=]", line)[0].replace("-", "_") for line in others - set(docs)}
    assert {"aiohttp", "rich", "pytest"} <= names
    build("-c", _WITHOUT, *names, "_isw", "--", str(tmp_path / "site"))
    assert (tmp_path / "site/man/infiniswap-run.1.html").exists()


def test_make_site_sets_up_nothing_else() -> None:
    done = ran("make", "--dry-run", "--always-make", "site", cwd=ROOT)
    assert "mkdocs" in done.stdout
    for other in ("tools/setup", "--editable", "cmake"):
        assert other not in done.stdout


def test_every_page_can_be_found_without_a_search() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    in_nav = set(re.findall(r": ([\w./-]+\.md)\b", text.partition("\nnav:\n")[2]))
    pages = {
        str(path.relative_to(ROOT / "docs"))
        for path in (ROOT / "docs").rglob("*.md")
        # Single decisions are found in their list; tools/manuals/site.py puts the manual there.
        if not path.is_relative_to(ROOT / "docs/man") and not re.match(r"\d", path.name)
    }
    assert pages == in_nav


def test_manual_pages_and_control_api_are_whole(site: Path) -> None:
    run = (site / "man/infiniswap-run.1.html").read_text(encoding="utf-8")
    for part in ("Synopsis", "<code>--local SIZE</code>", "Examples", 'href="infiniswap-device.1.'):
        assert part in run
    assert "man/infiniswap-run.1.html" in (site / "index.html").read_text(encoding="utf-8")
    assert "/v1/openapi.json</code></td>" in (site / "control-api.html").read_text(encoding="utf-8")
