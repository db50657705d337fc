#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# donor.sh ADDRESS SECRET: a daemon that lends memory at ADDRESS:9400, with the cluster's secret from
# the file SECRET. Under systemd as the service infiniswapd, else as a process in the background
# (/run/infiniswapd.pid, /var/log/infiniswapd.log).
#
# POOL and HEADROOM: what it lends at the most and keeps, for a machine of 1 GiB; SLAB: the unit.
set -eu

say() { echo "donor: $*"; }
fail() {
	echo "donor: $*" >&2
	exit 1
}

address=${1:?usage: donor.sh ADDRESS SECRET}
secret=${2:?usage: donor.sh ADDRESS SECRET}
[ "$(id -u)" = 0 ] || fail "this needs root: run it with sudo"
command -v infiniswap >/dev/null || fail "Infiniswap is not installed: run install.sh first"

settings() {
	cat /etc/infiniswap/infiniswap.toml /etc/infiniswap/secret \
		/etc/systemd/system/infiniswapd.service 2>/dev/null | cksum
}
before=$(settings)

install -d -m 0755 /etc/infiniswap
[ "$secret" = /etc/infiniswap/secret ] || install -m 0600 "$secret" /etc/infiniswap/secret
cat >/etc/infiniswap/infiniswap.toml <<EOF
[cluster]
secret_file = "/etc/infiniswap/secret"
# Virtual machines may stand still for seconds.
ask_s = 30
heartbeats_missed_max = 30

[daemon]
listen = "$address:9400"
pool = "${POOL:-256M}"
headroom = "${HEADROOM:-128M}"
slab = "${SLAB:-8M}"
EOF

if [ -d /run/systemd/system ]; then
	# The package has brought the units.
	[ -d /usr/lib/infiniswap/current ] || infiniswap service install >/dev/null
	systemctl --quiet enable infiniswapd
	if [ "$(settings)" = "$before" ] && systemctl --quiet is-active infiniswapd; then
		say "the daemon serves already, and its settings are the same"
	else
		systemctl restart infiniswapd || {
			journalctl --no-pager -u infiniswapd -n 20 >&2
			fail "the daemon does not start"
		}
	fi
else
	ready=/run/infiniswapd.ready
	log=/var/log/infiniswapd.log
	rm -f "$ready"
	setsid infiniswap daemon --ready-file "$ready" </dev/null >"$log" 2>&1 &
	echo $! >/run/infiniswapd.pid
	left=6000
	until [ -e "$ready" ]; do
		left=$((left - 1))
		if ! kill -0 $! 2>/dev/null || [ "$left" -le 0 ]; then
			cat "$log" >&2
			fail "the daemon does not serve"
		fi
		sleep 0.1
	done
fi
say "lends up to ${POOL:-256M} at $address:9400"
