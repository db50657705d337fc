#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh SOURCE: system packages and Infiniswap itself, from the checkout at SOURCE, into
# /opt/infiniswap. Where the command is there already nothing is installed.
set -eu

say() { echo "install: $*"; }
fail() {
	echo "install: $*" >&2
	exit 1
}

source=${1:?usage: install.sh SOURCE}
if found=$(command -v infiniswap); then
	say "$found is there already"
	exit 0
fi
[ "$(id -u)" = 0 ] || fail "this needs root: run it with sudo"
[ -e "$source/pyproject.toml" ] || fail "$source is no checkout of Infiniswap"
command -v apt-get >/dev/null || fail "there is no apt-get: README.md says what to install"

export DEBIAN_FRONTEND=noninteractive
say "packages"
apt-get update -qq
# The build's, then what runs: FUSE for kernels without ublk and nbd, iproute2 for `rdma`.
case "$(uname -m)" in x86_64) ipsec_mb=libipsec-mb-dev ;; *) ipsec_mb= ;; esac
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends \
	gcc libc6-dev pkg-config libfuse3-dev liburing-dev libibverbs-dev libssl-dev $ipsec_mb \
	python3-dev python3-venv fuse3 ibverbs-providers iproute2 kmod >/dev/null
say "Infiniswap in /opt/infiniswap (some minutes)"
python3 -m venv /opt/infiniswap
/opt/infiniswap/bin/pip install --quiet --disable-pip-version-check "$source"
ln -sf /opt/infiniswap/bin/infiniswap /usr/local/bin/infiniswap
say "$(infiniswap --version)"
