#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# consumer.sh SECRET DONOR...: the swap device swap0, whose pages lie in the memory of the donors
# (their addresses), with the cluster's secret from the file SECRET. Under systemd as the service
# infiniswap-device@swap0, else by `infiniswap device start`.
#
# SIZE: the device's; SLAB: the unit, as on the donors; TRANSPORT and FRONTEND as in the
# configuration; BACKUP_DIR: a directory on a local disk; MEMBER: a user who may run jobs on the
# device without root.
set -eu

say() { echo "consumer: $*"; }
fail() {
	echo "consumer: $*" >&2
	exit 1
}

secret=${1:?usage: consumer.sh SECRET DONOR...}
shift
[ $# -ge 1 ] || fail "usage: consumer.sh SECRET DONOR..."
[ "$(id -u)" = 0 ] || fail "this needs root: run it with sudo"
command -v infiniswap >/dev/null || fail "Infiniswap is not installed: run install.sh first"

settings() {
	cat /etc/infiniswap/infiniswap.toml /etc/infiniswap/secret /etc/infiniswap/devices/swap0.env \
		/etc/systemd/system/infiniswap-device@.service 2>/dev/null | cksum
}
before=$(settings)

peers=
for donor in "$@"; do
	peers="$peers${peers:+, }\"$donor\""
done
install -d -m 0755 /etc/infiniswap /etc/infiniswap/devices
[ "$secret" = /etc/infiniswap/secret ] || install -m 0600 "$secret" /etc/infiniswap/secret
cat >/etc/infiniswap/infiniswap.toml <<EOF
[cluster]
peers = [$peers]
secret_file = "/etc/infiniswap/secret"
# Virtual machines may stand still for seconds.
ask_s = 30

[device]
slab = "${SLAB:-8M}"
transport = "${TRANSPORT:-auto}"
frontend = "${FRONTEND:-auto}"
backup_dir = "${BACKUP_DIR:-/var/lib/infiniswap}"
staging = "16M"
connect_ms = 30000
request_ms = 30000

[policy]
# Little is paged here, and all of it is to go to donors.
hot_pages_per_s = 1
suspend_s = 20
EOF

# The front end's, or that of the best one that this kernel has; with neither, FUSE.
case ${FRONTEND:-auto} in
ublk) modules=ublk_drv ;;
nbd) modules=nbd ;;
fuse) modules= ;;
*) modules="ublk_drv nbd" ;;
esac
for module in $modules; do
	if modprobe "$module" 2>/dev/null; then
		[ ! -d /run/systemd/system ] || echo "$module" >/etc/modules-load.d/infiniswap.conf
		break
	fi
done

# A donor may be starting still.
for donor in "$@"; do
	left=300
	until timeout 2 bash -c ": <>/dev/tcp/$donor/9400" 2>/dev/null; do
		left=$((left - 1))
		[ "$left" -gt 0 ] || fail "the donor $donor does not answer at its port 9400"
		sleep 1
	done
done

options="--size ${SIZE:-256M} --swap"
if [ -d /run/systemd/system ]; then
	# The package has brought the units.
	[ -d /usr/lib/infiniswap/current ] || infiniswap service install >/dev/null
	[ -z "${MEMBER:-}" ] || usermod -aG infiniswap "$MEMBER"
	echo "DEVICE_OPTIONS=$options" >/etc/infiniswap/devices/swap0.env
	systemctl --quiet enable infiniswap-device@swap0
	# A restart takes the swap area away from the jobs on it: only for a reason.
	if [ "$(settings)" = "$before" ] && systemctl --quiet is-active infiniswap-device@swap0; then
		say "the device serves already, and its settings are the same"
	else
		systemctl restart infiniswap-device@swap0 || {
			journalctl --no-pager -u infiniswap-device@swap0 -n 20 >&2
			fail "the device does not start"
		}
	fi
else
	# shellcheck disable=SC2086
	infiniswap device start swap0 $options
fi
say "ready, for example: infiniswap run --local 64M --device swap0 -- COMMAND"
