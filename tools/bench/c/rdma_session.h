/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a device and a donor tell each other of RDMA, over standard output and input in place of
 * their control session. Here: the device's side.
 *
 *     out   {"ends": [[GID, LINK, LID, MTU, READS, NUMBER, PSN], ...]}    one line, GID in hex
 *     in    the donor's ends in the same order of fields, ADDRESS RKEY of the probe, ADDRESS RKEY
 * of each slot; all with blanks between
 */
#ifndef ISW_BENCH_RDMA_SESSION_H
#define ISW_BENCH_RDMA_SESSION_H

#include "bench.h"

BENCH_UNUSED_OK static void bench_tell_ends(const isw_rdma_offer *offer, uint32_t count)
{
	printf("{\"ends\": [");
	for (uint32_t i = 0; i < count; i++) {
		struct isw_rdma_end end;

		isw_rdma_offer_end(offer, i, &end);
		printf("%s[\"", i ? ", " : "");
		for (size_t byte = 0; byte < sizeof(end.gid); byte++)
			printf("%02x", end.gid[byte]);
		printf("\", %u, %u, %u, %u, %u, %u]", end.link, end.lid, end.mtu_bytes,
		       end.reads_max, end.number, end.psn);
	}
	printf("]}\n");
	fflush(stdout);
}

BENCH_UNUSED_OK static void bench_hear_end(struct isw_rdma_end *end)
{
	char gid[2 * sizeof(end->gid) + 1];

	*end = (struct isw_rdma_end){0};
	if (scanf("%32s %u %u %u %u %u %u", gid, &end->link, &end->lid, &end->mtu_bytes,
		  &end->reads_max, &end->number, &end->psn) != 7)
		bench_die("the donor told no end of a connection");
	for (size_t byte = 0; byte < sizeof(end->gid); byte++) {
		unsigned int value;

		if (sscanf(gid + 2 * byte, "%2x", &value) != 1)
			bench_die("%s: no GID", gid);
		end->gid[byte] = (uint8_t)value;
	}
}

BENCH_UNUSED_OK static void bench_hear_key(struct isw_rdma_key *key)
{
	unsigned long long address;

	if (scanf("%llu %u", &address, &key->rkey) != 2)
		bench_die("the donor told no key");
	key->address = address;
}

BENCH_UNUSED_OK static void bench_hear_answer(struct isw_rdma_end *ends, uint32_t count,
					      struct isw_rdma_key *probe, struct isw_rdma_key *keys,
					      uint32_t slots)
{
	for (uint32_t i = 0; i < count; i++)
		bench_hear_end(&ends[i]);
	bench_hear_key(probe);
	for (uint32_t i = 0; i < slots; i++)
		bench_hear_key(&keys[i]);
}

#endif
