#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh SOURCE: Infiniswap, and what soft-RoCE needs. SOURCE is a directory with Debian packages
# (of `make deb`, or of a release), of which the one for this system is installed, or a checkout, which
# is built into /opt/infiniswap. What is installed already is left alone, but for a package of another
# version.
set -eu

say() { echo "install: $*"; }
fail() {
	echo "install: $*" >&2
	exit 1
}

source=${1:?usage: install.sh SOURCE}
package=
if ls "$source"/*.deb >/dev/null 2>&1; then
	package=yes
elif found=$(command -v infiniswap); then
	say "$found is there already"
	exit 0
fi
[ "$(id -u)" = 0 ] || fail "this needs root: run it with sudo"
command -v apt-get >/dev/null || fail "there is no apt-get: README.md says what to install"
export DEBIAN_FRONTEND=noninteractive

# iproute2 has `rdma`, ibverbs-providers what soft-RoCE needs; the jobs in the documents are Python's.
needed="ibverbs-providers iproute2 kmod python3"
apt_install() {
	# consumer.sh and donor.sh write the configuration file of the package.
	apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "$@" >/dev/null
}

if [ -n "$package" ]; then
	release=$(. /etc/os-release && echo "${VERSION_ID:-}")
	files=$(ls "$source"/infiniswap_*"~deb${release}_$(dpkg --print-architecture).deb" 2>/dev/null || true)
	[ -n "$files" ] || fail "no package for Debian ${release:-without a number} and" \
		"$(dpkg --print-architecture) in $source: $(ls "$source" | tr '\n' ' ')"
	[ "$(echo "$files" | wc -l)" = 1 ] || fail "several packages for this system, leave one:" $files
	new=$(dpkg-deb --show --showformat '${Version}' "$files")
	if [ "$(dpkg-query --show --showformat '${Version}' infiniswap 2>/dev/null)" = "$new" ]; then
		say "the package infiniswap $new is there already"
		exit 0
	fi
	say "the package $(basename "$files")"
	apt-get update -qq || say "apt-get update failed; going on with the lists there are"
	# shellcheck disable=SC2086
	apt_install --allow-downgrades "$(realpath "$files")" $needed
	say "$(infiniswap --version)"
	exit 0
fi

[ -e "$source/pyproject.toml" ] || fail "$source has no package and is no checkout of Infiniswap"
say "packages"
apt-get update -qq
# The build's, then FUSE for kernels without ublk and nbd.
case "$(uname -m)" in x86_64) ipsec_mb=libipsec-mb-dev ;; *) ipsec_mb= ;; esac
# shellcheck disable=SC2086
apt_install gcc libc6-dev pkg-config libfuse3-dev liburing-dev libibverbs-dev libssl-dev $ipsec_mb \
	python3-dev python3-venv fuse3 $needed
say "Infiniswap in /opt/infiniswap (some minutes)"
python3 -m venv /opt/infiniswap
/opt/infiniswap/bin/pip install --quiet --disable-pip-version-check "$source"
ln -sf /opt/infiniswap/bin/infiniswap /usr/local/bin/infiniswap
say "$(infiniswap --version)"
