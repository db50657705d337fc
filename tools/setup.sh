#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Set-up, first part: system packages. Called by `make setup`; the Makefile calls it again only when
# this file has changed. C is then built while setup_venv.sh installs Python packages, with `make -j`.
#
# System packages are installed through apt where apt exists and we are root; otherwise what is
# missing is named, with the command. Only what is found missing is asked for, so that a machine
# with its own compiler or Python keeps them.
set -eu

PYTHON=${PYTHON:-python3}
PATH=$PATH:/usr/sbin:/sbin

say() { echo "setup: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# Packages without which nothing can be built.
needed=
need() { needed="$needed $1"; }
have "$PYTHON" || need python3
have cmake || need cmake
have pkg-config || need pkg-config
echo '#include <stdio.h>' | cc -E - >/dev/null 2>&1 || { need gcc; need libc6-dev; }
if ! have "$PYTHON"; then
	need python3-venv
	need python3-dev
else
	"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
	"$PYTHON" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
' || need python3-dev
fi

# Packages without which a part or a test is left out.
wanted=
want() { wanted="$wanted $1"; }
pkg-config --exists fuse3 2>/dev/null || want libfuse3-dev
have fusermount3 || want fuse3
pkg-config --exists liburing 2>/dev/null || want liburing-dev
# Of libibverbs only headers are needed to build; it is loaded where a host has it.
echo '#include <infiniband/verbs.h>' | cc -E - >/dev/null 2>&1 || want libibverbs-dev
pkg-config --exists 'libcrypto >= 3.0' 2>/dev/null || want libssl-dev
# Intel's library is for x86-64 only.
case "$(uname -m)" in
x86_64) echo '#include <intel-ipsec-mb.h>' | cc -E - >/dev/null 2>&1 || want libipsec-mb-dev ;;
esac
[ -e /etc/libibverbs.d/rxe.driver ] || want ibverbs-providers
# An independent consumer, for the tests; it is built for the distribution's Python.
/usr/bin/python3 -c 'import pyverbs.device' 2>/dev/null || want python3-pyverbs
have nbdinfo && have nbdcopy || want libnbd-bin
have nbdsh || want python3-libnbd
have qemu-io || want qemu-utils
have fio || want fio
have ip && have tc || want iproute2
have mkfs.ext4 || want e2fsprogs
have mkfs.btrfs || want btrfs-progs
have dmsetup || want dmsetup
have modprobe || want kmod
have losetup || want mount
have clang-format || want clang-format
# Fuzzers: libFuzzer is in a package of its own.
echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d == 0 && n; }' |
	clang -x c -fsanitize=fuzzer,address -o /dev/null - 2>/dev/null || {
	want clang
	want libclang-rt-dev
}
# Virtual machines (docs/vm.md).
have qemu-system-x86_64 || want qemu-system-x86
have busybox || want busybox-static
have nbd-client || want nbd-client
# Fresh systems, in which the wheel is installed.
have debootstrap || want debootstrap
# The manual.
have groff || want groff-base
have mandoc || want mandoc
# Views in a terminal, and the page in a browser.
have tmux || want tmux
have chromium || want chromium
have zsh || want zsh
have fish || want fish
# promtool, which checks metrics and alert rules, comes with the Prometheus server. That is not
# installed, as its package would start it: the one program is taken out (it needs libc alone).
take_promtool() {
	directory=$(mktemp -d)
	if (
		cd "$directory"
		apt-get download -qq prometheus || {
			apt-get update -qq
			apt-get download -qq prometheus
		}
		dpkg-deb -x prometheus_*.deb .
		install -D usr/bin/promtool /usr/local/bin/promtool
	) >/dev/null 2>&1; then
		say "took promtool out of the package prometheus, into /usr/local/bin"
	else
		say "could not get promtool"
	fi
	rm -rf "$directory"
}
# By it the documents show how metrics are read by hand.
have curl || want curl
# Benchmarks' peer, whose smoke tests belong to the suite.
have nbdkit || want nbdkit
# A broker for the tests of discovery; they run its program themselves.
have mosquitto || want mosquitto

# A software TPM, and the libraries by which systemd-creds talks to it.
have swtpm || want swtpm
for library in libtss2-esys libtss2-rc; do
	ldconfig -p 2>/dev/null | grep -q "$library.so.0 " && continue
	case $library in *esys) want libtss2-esys-3.0.2-0 ;; *) want libtss2-rc0 ;; esac
done

# Debian starts a service as it is installed, unless the host's own policy says no, and at each boot.
# Somebody who had no broker before must have none after this either.
POLICY=/usr/sbin/policy-rc.d
has_our_policy=
keep_broker_down() {
	[ ! -e "$POLICY" ] || return 0 # the host has a policy: it is the administrator's
	has_our_policy=yes
	printf '%s\n' '#!/bin/sh' '[ "$1" != mosquitto ] || exit 101' >"$POLICY"
	chmod 755 "$POLICY"
	trap 'rm -f "$POLICY"' EXIT
	trap 'exit 1' HUP INT TERM
}
disable_broker() {
	[ -z "$has_our_policy" ] || rm -f "$POLICY"
	deb-systemd-helper disable mosquitto.service >/dev/null 2>&1 || true
	update-rc.d mosquitto disable >/dev/null 2>&1 || true
	[ ! -x "$(command -v systemctl)" ] || systemctl stop mosquitto.service >/dev/null 2>&1 || true
}

if [ -n "$needed$wanted" ]; then
	if have apt-get && [ "$(id -u)" = 0 ]; then
		say "installing system packages:$needed$wanted"
		export DEBIAN_FRONTEND=noninteractive
		case "$wanted" in *mosquitto*) no_broker=yes ;; *) no_broker= ;; esac
		[ -z "$no_broker" ] || keep_broker_down
		apt-get update -qq || say "apt-get update failed; going on with the lists there are"
		# One by one after a failure: a single unknown package must not stop the others.
		# shellcheck disable=SC2086
		apt-get install -y -qq --no-install-recommends $needed $wanted >/dev/null || {
			for package in $needed $wanted; do
				apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
					say "could not install $package"
			done
		}
		[ -z "$no_broker" ] || disable_broker
	else
		[ -z "$needed" ] || say "missing, and needed:$needed"
		[ -z "$wanted" ] || say "missing (a part or some tests are left out):$wanted"
		say "as root on Debian: apt-get install$needed$wanted"
	fi
fi

if ! have promtool; then
	if have apt-get && [ "$(id -u)" = 0 ]; then
		take_promtool
	else
		say "missing (some tests are left out): promtool, of Debian's package prometheus"
	fi
fi

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	say "Python 3.11 or later is needed; '$PYTHON' is $("$PYTHON" -V 2>&1 || echo missing)." \
		"Name another with: make PYTHON=/path/to/python3.11"
	exit 1
fi
echo '#include <stdio.h>' | cc -E - >/dev/null 2>&1 || { say "no C compiler (cc)"; exit 1; }
