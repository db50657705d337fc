# SPDX-License-Identifier: Apache-2.0
# Each target does the set-up that it needs. `make help` lists them.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
RUN := $(VENV)/bin
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60
BENCH_ARGS ?=
MUTATIONS ?=

C_SOURCES := $(shell find csrc tests/c tests/fuzz tools/bench/c -name '*.[ch]' 2>/dev/null | sort)
C_BUILD := CMakeLists.txt $(shell find csrc tests/c -name '*.[ch]' 2>/dev/null)

.PHONY: help setup demo test test-full test-guides bench bench-faults bench-frontends bench-rdma bench-before bench-apps bench-plan chart check lint asan tsan fuzz mutations man site pictures wheel deb deb-lock image release changelog format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up, then two donors, a device and a real job on this machine (as root)"
	@echo "make test    set up, then every test that can run here; says which cannot"
	@echo "make test-full  the same with every kernel and all counts; takes much longer"
	@echo "make test-guides  installs the libraries of docs/howto, then runs the commands there"
	@echo "make check   what CI runs: lint, then test"
	@echo "make bench   comparisons with floor, peers and disks; BENCH_ARGS=--help (docs/benchmarks.md)"
	@echo "make bench-faults  what evictions and dying donors cost; BENCH_ARGS=--help"
	@echo "make bench-frontends  ublk, nbd and fuse beside nbdkit, and what a killed device costs"
	@echo "make bench-rdma  RDMA beside perftest and TCP; BENCH_ARGS=--help"
	@echo "make bench-before  any of these in an earlier tree and in this one, by turns"
	@echo "make bench-apps  other people's benchmarks with half of their memory; BENCH_ARGS=--help"
	@echo "make bench-plan  errors of infiniswap plan on five jobs; BENCH_ARGS=--help"
	@echo "make chart   draws the picture in README.md from a summary of bench-apps"
	@echo "make mutations  breaks the C library rule by rule and looks which test notices"
	@echo "make asan    C tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make tsan    C tests under ThreadSanitizer"
	@echo "make fuzz    every fuzzer for FUZZ_SECONDS ($(FUZZ_SECONDS)); findings in build/fuzz/"
	@echo "make man     writes the manual pages from the parsers and docs/man/"
	@echo "make pictures  docs/page.png, page-dark.png and top.png, of a cluster that it makes (as root)"
	@echo "make wheel   a package for x86-64 hosts without a compiler, in build/dist/"
	@echo "make deb     that, and packages for Debian 12 and 13, in build/dist/"
	@echo "make image   a container image of the donor, as root, in build/dist/"
	@echo "make release everything that is published of a commit, in build/release/"
	@echo "make changelog  gathers changes.d/ into CHANGELOG.md"
	@echo "make site    the documentation as web pages, in build/site/"
	@echo "make setup   only the set-up: system packages (as root), $(VENV)/, build/"
	@echo "make format  rewrites Python and C to the project's style"
	@echo "make clean   removes what set-up made, but not system packages"

# The scripts do nothing, quickly, where nothing has changed.
setup: $(VENV)/.stamp-extension build/c/.stamp
	@:

$(VENV)/.stamp-system: tools/setup.sh
	@PYTHON="$(PYTHON)" sh tools/setup.sh
	@mkdir -p $(VENV)
	@touch $@

$(VENV)/.stamp-venv: pyproject.toml tools/setup_venv.sh $(VENV)/.stamp-system
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/setup_venv.sh
	@touch $@

# Rebuilt when any C source changes. Python sources are used from the tree as they are; where each
# module lies is recorded when this is built, so a new room (__init__.py) rebuilds it as well.
ROOMS := $(shell find infiniswap -name __init__.py)
$(VENV)/.stamp-extension: $(VENV)/.stamp-venv $(C_BUILD) $(ROOMS) infiniswap/engine/build_cdef.py csrc/sim/build_binding.py LICENSE
	@echo "setup: building the C library and its Python binding"
	@MAKEFLAGS= CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(RUN)/python -m pip install --quiet \
		--disable-pip-version-check --root-user-action=ignore --no-build-isolation --no-deps \
		--config-settings=logging.level=WARNING --editable .
	@touch $@

define c_build
	@echo "setup: building the C tests in $(1)"
	@cmake -S . -B $(1) -DISW_TESTS=ON $(2) >$(1).log 2>&1 || { cat $(1).log; exit 1; }
	@grep 'infiniswap:' $(1).log || true
	@MAKEFLAGS= cmake --build $(1) -j $(JOBS) >>$(1).log 2>&1 || { tail -n 60 $(1).log; exit 1; }
	@touch $(1)/.stamp
endef

build/c/.stamp: $(VENV)/.stamp-system $(C_BUILD)
	@mkdir -p build
	$(call c_build,build/c,)

build/asan/.stamp: $(VENV)/.stamp-system $(C_BUILD)
	@mkdir -p build
	$(call c_build,build/asan,-DISW_SANITIZE=address -DISW_BENCH=ON)

build/tsan/.stamp: $(VENV)/.stamp-system $(C_BUILD)
	@mkdir -p build
	$(call c_build,build/tsan,-DISW_SANITIZE=thread -DISW_BENCH=ON)

test: setup
	@$(RUN)/python -m pytest -rs $(PYTEST_ARGS)

test-full: setup
	@INFINISWAP_TEST_FULL=1 $(RUN)/python -m pytest -rs $(PYTEST_ARGS)

# Each guide as it stands, with the libraries that it is about.
test-guides: setup $(VENV)/.stamp-bench-apps $(VENV)/.stamp-guides
	@INFINISWAP_TEST_FULL=1 $(RUN)/python -m pytest -rs tests/system/test_doc_commands.py \
		tests/system/guides $(PYTEST_ARGS)

demo: setup
	@$(RUN)/infiniswap demo

# Builds its own C programs, in build/bench; jobs of the area `far` need the libraries of bench-apps.
bench: setup $(VENV)/.stamp-bench-apps
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench peers $(BENCH_ARGS)

bench-faults: setup
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench faults $(BENCH_ARGS)

bench-frontends: setup
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench frontends $(BENCH_ARGS)

bench-rdma: setup
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench rdma $(BENCH_ARGS)

# BEFORE: the commit to compare with; SUITE: peers, faults, frontends or rdma. Needs a clone with its history.
bench-before: setup
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench before $(BEFORE) $(SUITE) $(BENCH_ARGS)

# Extras with packages that nothing else needs.
$(VENV)/.stamp-bench-apps $(VENV)/.stamp-guides: $(VENV)/.stamp-%: $(VENV)/.stamp-venv
	@echo "$*: installing the libraries of this extra into $(VENV)"
	@$(RUN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"]))' \
		>$(VENV)/$*.txt
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
		--requirement $(VENV)/$*.txt
	@touch $@

bench-apps: setup $(VENV)/.stamp-bench-apps
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench apps $(BENCH_ARGS)

# What `infiniswap plan` predicts beside separate runs: 1 when the errors are too large.
bench-plan: setup $(VENV)/.stamp-bench-apps
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench plan $(BENCH_ARGS)

# The picture in README.md, of a summary in docs/.
chart: setup
	@PYTHONPATH=tools/bench $(RUN)/python -m isw_bench.apps.overview_plot

# They are kept in the tree: building a package needs neither this nor what it imports.
man: setup
	@PYTHONPATH=tools $(RUN)/python -m manuals

# Pages need neither a compiler nor system packages, and of Python's only the extra `docs`.
build/site-venv/.stamp: pyproject.toml
	@echo "site: installing mkdocs into build/site-venv"
	@$(PYTHON) -m venv build/site-venv
	@$(PYTHON) -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' \
		>build/site-venv/requirements.txt
	@build/site-venv/bin/python -m pip install --quiet --disable-pip-version-check \
		--root-user-action=ignore --requirement build/site-venv/requirements.txt
	@touch $@

site: build/site-venv/.stamp
	@PYTHONPATH=tools:. build/site-venv/bin/python -m mkdocs --quiet build --strict

# Of both views: a browser's page and a terminal.
pictures: setup
	@PYTHONPATH=tools:. $(RUN)/python -m pictures

# Built as `pip install .` does; then the libraries that it links are put into it (docs/adr/0043-wheel.md).
# A commit gives the same bytes wherever it is built with the same tools: hence the copy, whose modes
# no umask has made.
WHEEL_SOURCES := CMakeLists.txt LICENSE README.md pyproject.toml csrc docs infiniswap
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(VENV)/.stamp-venv
	@rm -rf build/wheel build/dist && mkdir -p build/wheel/tree
	@umask 022; tar --create --mode=u=rwX,go=rX --exclude=__pycache__ $(WHEEL_SOURCES) | tar --extract --directory build/wheel/tree
	@umask 022; CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(RUN)/python -m pip wheel --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps --config-settings=cmake.define.ISW_WHEEL=ON \
		--wheel-dir build/wheel build/wheel/tree
	@umask 022; PATH="$(abspath $(RUN)):$$PATH" auditwheel repair --wheel-dir build/dist build/wheel/*.whl \
		>build/wheel/auditwheel.log 2>&1 || { cat build/wheel/auditwheel.log; exit 1; }
	@ls build/dist/*.whl

# Made of the wheel and of wheels from PyPI, so that no release of Debian but this machine's is needed
# (docs/adr/0044-debian-package.md). DEB_ARGS: --release 12, --version VERSION.
DEB_ARGS ?=
deb: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
deb: wheel
	@PYTHONPATH=tools:. $(RUN)/python -m deb_package build --wheel build/dist/*.whl --into build/dist $(DEB_ARGS)

# Newer versions of what the packages carry.
deb-lock: $(VENV)/.stamp-venv
	@PYTHONPATH=tools:. $(RUN)/python -m deb_package lock

# As root. buildah puts the Debian package into a system of Debian 12 (docs/howto/kubernetes.md).
image: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
image: deb
	@PYTHONPATH=tools:. $(RUN)/python -m container_image --deb build/dist/*.deb --into build/dist

# Builds the packages in build/dist/; the source archive, the bill of materials, the release notes
# and SHA256SUMS join them in build/release/ (tools/release/). The commit alone decides the bytes.
RELEASE := PYTHONPATH=tools:. $(RUN)/python -m release
release: $(VENV)/.stamp-venv
	@time=$$($(RELEASE) check) && \
		$(MAKE) --no-print-directory deb SOURCE_DATE_EPOCH=$$time DEB_ARGS= && \
		$(RELEASE) gather

# After the version in pyproject.toml and infiniswap/__init__.py was raised, before the commit.
changelog: setup
	@$(RUN)/python -m towncrier build --yes

mutations: setup
	@$(RUN)/python tools/mutations.py $(MUTATIONS)

asan: setup build/asan/.stamp
	@$(RUN)/python -m pytest -rs tests/c -k asan $(PYTEST_ARGS)

tsan: setup build/tsan/.stamp
	@$(RUN)/python -m pytest -rs tests/c -k tsan $(PYTEST_ARGS)

# Without atheris the fuzzer of the Python parts runs on hypothesis.
fuzz: setup
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
		--only-binary=:all: "atheris>=2.3,<4" || echo "fuzz: no atheris for this Python"
	@$(RUN)/python tests/fuzz/fuzzers.py --seconds $(FUZZ_SECONDS)

lint: setup
	$(RUN)/ruff check infiniswap tools tests csrc
	$(RUN)/ruff format --check infiniswap tools tests csrc
	$(RUN)/mypy
	$(RUN)/python tools/check_layers.py
	$(RUN)/python tools/check_words.py
	@if command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(C_SOURCES); \
	else echo "lint: clang-format is missing: the C style was not checked"; fi

check: lint test

format: setup
	$(RUN)/ruff check --fix --select I infiniswap tools tests csrc
	$(RUN)/ruff format infiniswap tools tests csrc
	clang-format -i $(C_SOURCES)

clean:
	rm -rf build $(VENV)
