#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rxe.sh ADDRESS: soft-RoCE (the kernel's rdma_rxe) on the interface that has ADDRESS. With systemd
# it is there again after a boot, before the daemon and devices.
set -eu

say() { echo "rxe: $*"; }
fail() {
	echo "rxe: $*" >&2
	exit 1
}

address=${1:?usage: rxe.sh ADDRESS}
[ "$(id -u)" = 0 ] || fail "this needs root: run it with sudo"
PATH=$PATH:/usr/sbin:/sbin
for program in ip rdma; do
	command -v "$program" >/dev/null ||
		fail "the program $program is missing. On Debian: apt-get install iproute2"
done
ldconfig -p | grep -q libibverbs.so.1 ||
	fail "libibverbs is missing. On Debian: apt-get install ibverbs-providers"
[ -e /etc/libibverbs.d/rxe.driver ] ||
	fail "libibverbs has no provider for soft-RoCE. On Debian: apt-get install ibverbs-providers"
for module in rdma_rxe ib_uverbs; do
	modprobe "$module" || fail "kernel $(uname -r) has no module $module. Debian's cloud kernels" \
		"lack it: apt-get install linux-image-amd64, and boot that one"
done

interface=$(ip -o -4 address show |
	awk -v a="$address" '{ split($4, part, "/") } part[1] == a { print $2; exit }')
[ -n "$interface" ] || fail "no interface of this host has the address $address"
if rdma link show | grep -q " netdev $interface\( \|$\)"; then
	say "$interface has an RDMA device already"
else
	rdma link add rxe0 type rxe netdev "$interface" || fail "no soft-RoCE on $interface"
fi

# The port is usable once it has a GID of the address: 0000:...:ffff:0a58:0001.
old_ifs=$IFS
IFS=.
# shellcheck disable=SC2086
gid=$(printf 'ffff:%02x%02x:%02x%02x' $address)
IFS=$old_ifs
left=300
until cat /sys/class/infiniband/*/ports/*/gids/* 2>/dev/null | grep -q ":$gid\$"; do
	left=$((left - 1))
	[ "$left" -gt 0 ] || fail "the port on $interface has got no GID of $address"
	sleep 0.1
done
say "$(rdma link show | grep " netdev $interface\( \|$\)")"

# What follows makes it last; this file is its own service's program.
own=/usr/local/sbin/infiniswap-rxe
if [ -d /run/systemd/system ] && [ "$0" != "$own" ]; then
	install -m 0755 "$0" "$own"
	cat >/etc/systemd/system/infiniswap-rxe.service <<EOF
[Unit]
Description=Soft-RoCE on the interface of $address
Wants=network-online.target
After=network-online.target
Before=infiniswapd.service infiniswap-device@swap0.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=$own $address

[Install]
WantedBy=multi-user.target
EOF
	systemctl daemon-reload
	# It finds its work done; but now the host says that it has the service.
	systemctl --quiet enable --now infiniswap-rxe.service
fi
