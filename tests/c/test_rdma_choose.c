/* SPDX-License-Identifier: Apache-2.0 */
/* Which port and GID lead to a peer, and what is said where none does. */
#define _GNU_SOURCE 1
#define OWN_MAIN
#include <arpa/inet.h>
#include <net/if.h>
#include <sched.h>

#include "tests.h"
#include "verbs_stub.h"

static void refused(const char *host, int code, const char *words)
{
	struct iswi_verbs_choice choice;
	struct isw_error error = {0};

	CHECK_EQ(iswi_verbs_choose(&stub_verbs, host, &choice, &error), code);
	CHECK_EQ(error.code, code);
	if (strstr(error.text, words) == NULL) {
		fprintf(stderr, "%s\n", error.text);
		CHECK(0);
	}
}

TEST(test_the_gid_of_the_address_is_taken)
{
	struct iswi_verbs_choice choice, theirs;
	struct isw_error error = {0};

	stub.port_count = 0;
	stub_port("stub0")->gids = 1; /* link-local only */
	stub_port("stub1");
	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "127.0.0.1", &choice, &error), 0);
	CHECK(strcmp(choice.device, "stub1") == 0);
	CHECK_EQ(choice.gid_index, 2);
	CHECK_EQ(choice.end.mtu_bytes, 4096);
	CHECK_EQ(choice.end.reads_max, 16);
	/* A donor finds the same from what the consumer says of itself. */
	CHECK_EQ(iswi_verbs_choose_for(&stub_verbs, &choice.end, &theirs, &error), 0);
	CHECK(strcmp(theirs.device, "stub1") == 0);
	CHECK_EQ(theirs.gid_index, 2);
}

TEST(test_each_reason_has_its_sentence)
{
	struct isw_rdma_port *port;

	stub.port_count = 0;
	refused("127.0.0.1", -ENODEV, "no RDMA device");
	port = stub_port("stub0");
	port->active = 0;
	refused("127.0.0.1", -ENETDOWN, "stub0");
	port->active = 1;
	port->gid[2].type = ISW_RDMA_GID_OTHER;
	refused("127.0.0.1", -EADDRNOTAVAIL, "version 1");
	port->gids = 1;
	refused("127.0.0.1", -EADDRNOTAVAIL, "RoCE v2 GID of 127.0.0.1");
	refused("no-such-host.invalid", -ENXIO, "cannot be resolved");
	/* One that is up is of no use if it is another one that leads there. */
	stub_port("stub1")->active = 0;
	refused("127.0.0.1", -ENETDOWN, "stub1");
}

TEST(test_infiniband_has_no_address)
{
	struct iswi_verbs_choice choice, theirs;
	struct isw_error error = {0};
	struct isw_rdma_port *port;

	stub.port_count = 0;
	port = stub_port("stub0");
	port->link = ISW_RDMA_LINK_INFINIBAND;
	refused("127.0.0.1", -EADDRNOTAVAIL, "127.0.0.1"); /* without a LID it is not set up */
	port->lid = 17;
	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "127.0.0.1", &choice, &error), 0);
	CHECK_EQ(choice.end.link, ISW_RDMA_LINK_INFINIBAND);
	CHECK_EQ(choice.end.lid, 17);
	CHECK_EQ(iswi_verbs_choose_for(&stub_verbs, &choice.end, &theirs, &error), 0);
	CHECK_EQ(theirs.end.lid, 17);
	port->active = 0;
	CHECK_EQ(iswi_verbs_choose_for(&stub_verbs, &choice.end, &theirs, &error), -ENETDOWN);
	/* RoCE goes before it where both lead there. */
	port->active = 1;
	stub_port("stub1");
	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "127.0.0.1", &choice, &error), 0);
	CHECK_EQ(choice.end.link, ISW_RDMA_LINK_ETHERNET);
}

TEST(test_a_consumer_from_nowhere)
{
	struct isw_rdma_end peer = {.link = ISW_RDMA_LINK_ETHERNET};
	struct iswi_verbs_choice choice;
	struct isw_error error = {0};

	stub.port_count = 0;
	stub_port("stub0");
	memset(peer.gid, 0xff, sizeof(peer.gid)); /* multicast: no way leads there */
	CHECK(iswi_verbs_choose_for(&stub_verbs, &peer, &choice, &error) < 0);
	CHECK(error.text[0]);
}

/*
 * One link-local address on two interfaces, as on a network card and its VLAN: the interface
 * decides, which a consumer's name has and its GID has not.
 */
TEST(test_a_link_local_peer_is_reached_by_its_interface)
{
	static const uint8_t ours[16] = {0xfe, 0x80, [15] = 1}, theirs[16] = {0xfe, 0x80, [15] = 2};
	struct isw_rdma_end peer = {.link = ISW_RDMA_LINK_ETHERNET};
	struct iswi_verbs_choice choice;
	struct isw_error error = {0};

	if (unshare(CLONE_NEWNET) != 0)
		return; /* that needs root */
	if (system("ip link add isw0 type veth peer name isw1 && "
		   "for i in isw0 isw1; do ip addr add fe80::1/64 dev $i nodad && "
		   "ip link set $i addrgenmode none up || exit 1; done") != 0)
		return; /* that needs ip */
	stub.port_count = 0;
	for (unsigned i = 0; i < 2; i++) {
		struct isw_rdma_port *port = stub_port(i == 0 ? "stub0" : "stub1");

		port->gids = 0;
		stub_gid(port, ours, ISW_RDMA_GID_ROCE_V2);
		port->gid[0].scope = if_nametoindex(i == 0 ? "isw0" : "isw1");
	}
	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "fe80::2%isw0", &choice, &error), 0);
	CHECK(strcmp(choice.device, "stub0") == 0);
	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "fe80::2%isw1", &choice, &error), 0);
	CHECK(strcmp(choice.device, "stub1") == 0);
	memcpy(peer.gid, theirs, sizeof(peer.gid));
	for (unsigned i = 0; i < 2; i++) {
		peer.scope = if_nametoindex(i == 0 ? "isw0" : "isw1");
		CHECK_EQ(iswi_verbs_choose_for(&stub_verbs, &peer, &choice, &error), 0);
		CHECK(strcmp(choice.device, i == 0 ? "stub0" : "stub1") == 0);
	}
}

/* Whatever this host has: an answer, or a reason. */
TEST(test_this_host)
{
	static struct isw_rdma_port ports[ISWI_VERBS_PORTS_MAX];
	struct isw_error error = {0};
	struct isw_rdma_gid gid;
	int count = isw_rdma_ports(ports, ISWI_VERBS_PORTS_MAX, &error);

	CHECK(count != 0);
	if (count < 0)
		CHECK(error.text[0] && error.code == count);
	if (isw_rdma_choose("127.0.0.1", &ports[0], &gid, &error) != 0)
		CHECK(error.text[0]);
}

int main(void)
{
	stub_start();
	run_tests();
	stub_stop();
	return 0;
}
