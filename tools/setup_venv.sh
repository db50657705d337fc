#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Set-up, second part: the virtual environment. Called by `make setup` after setup.sh; the Makefile
# calls it again only when pyproject.toml or one of the two has changed.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

say() { echo "setup: $*"; }

if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
	say "making the virtual environment $VENV with $("$PYTHON" -V)"
	"$PYTHON" -m venv "$VENV"
fi

say "installing Python packages into $VENV"
# What the package needs comes from pyproject.toml alone; the package itself is built by the
# Makefile, without isolation, so the build's own requirements are installed here as well.
"$VENV/bin/python" - <<'EOF' >"$VENV/requirements.txt"
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
for name, extra in project["project"]["optional-dependencies"].items():
    if name not in ("bench-apps", "guides"):  # large; make bench-apps and test-guides install them
        requirements += extra
print("\n".join(requirements))
EOF
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	--requirement "$VENV/requirements.txt"
