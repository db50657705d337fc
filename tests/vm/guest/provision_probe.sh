#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Under a systemd: the provisioning scripts make a donor and a consumer of one machine, and a job
# swaps. Run twice, as a second `vagrant provision` would, they leave what runs alone; with other
# settings they restart it.
#
#   provision_probe.sh SCRIPTS PAGECHECK
set -eux
scripts=$1
pagecheck=$2
address=10.89.0.10
export SIZE=64M SLAB=8M POOL=96M HEADROOM=64M BACKUP_DIR=/var/tmp/provision TRANSPORT=rdma

modprobe dummy
ip link add isw-lan type dummy
ip address add $address/24 dev isw-lan
ip link set isw-lan mtu 4200 up
head -c 32 /dev/urandom | base64 >/run/secret
processes() {
	echo "$(systemctl show --value -p MainPID infiniswapd)" \
		"$(systemctl show --value -p MainPID infiniswap-device@swap0)"
}
sh "$scripts/install.sh" /nowhere
sh "$scripts/rxe.sh" $address
sh "$scripts/rxe.sh" $address
# One after the other: both write the one configuration file of this host.
sh "$scripts/donor.sh" $address /run/secret
before=$(processes)
sh "$scripts/donor.sh" $address /run/secret
[ "$(processes)" = "$before" ]
POOL=104M sh "$scripts/donor.sh" $address /run/secret
[ "$(processes)" != "$before" ]
sh "$scripts/consumer.sh" /run/secret $address
before=$(processes)
sh "$scripts/consumer.sh" /run/secret $address
[ "$(processes)" = "$before" ]
infiniswap run --local 20M --device swap0 -- "$pagecheck" 32 1 1
infiniswap device show swap0
systemctl is-active infiniswap-rxe
systemctl stop infiniswap-device@swap0 infiniswapd
# As after a boot: what was installed brings the RDMA device back.
rdma link delete rxe0
/usr/local/sbin/infiniswap-rxe $address
rdma link delete rxe0
ip link delete isw-lan
systemctl is-enabled infiniswap-rxe infiniswapd infiniswap-device@swap0
echo PROVISIONED
