/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A donor's store as a process of its own, without the daemon around it: one lease with every
 * slot mapped. Prints {"port": ..., "ticket": ..., ...} and serves until its input ends.
 *
 *     isw-bench-donor --slab-bytes N --slots N
 */
#include "bench.h"

int main(int argc, char **argv)
{
	uint64_t slab_bytes = bench_number(argc, argv, "slab-bytes", 64u << 20);
	uint32_t slots = (uint32_t)bench_number(argc, argv, "slots", 4);
	struct isw_store_config config = {
		.slab_bytes = slab_bytes,
		.slabs_max = slots,
		.leases_max = 1,
		.connections_max = 64,
		.connections_per_lease_max = 64,
		.handshake_ms_max = 5000,
		.send_ms_max = 30000,
	};
	const struct isw_ticket_config any_number = {.uses = UINT32_MAX};
	char ticket[ISW_TICKET_TEXT_BYTES], line[16];
	struct isw_error error = {0};
	isw_store *store;
	uint64_t lease;
	uint16_t port;

	bench_die_with_parent();
	if (isw_store_create(&config, &store, &error))
		bench_die("%s", error.text);
	for (uint32_t i = 0; i < slots; i++)
		if (isw_store_preallocate(store, &error))
			bench_die("%s", error.text);
	if (isw_store_listen(store, "127.0.0.1", 0, &port, &error))
		bench_die("%s", error.text);
	if (isw_store_lease_create(store, slots, &lease, &error))
		bench_die("%s", error.text);
	if (isw_store_ticket(store, lease, &any_number, ticket))
		bench_die("no ticket");
	for (uint32_t i = 0; i < slots; i++) {
		uint64_t generation;
		uint32_t slot;

		/* Slots are taken from 0 up: the export has no hole. */
		if (isw_store_map(store, lease, i, &slot, &generation) || slot != i)
			bench_die("slot %u was not mapped", i);
	}
	printf("{\"port\": %u, \"ticket\": \"%s\", \"slab_bytes\": %llu, \"slots\": %u}\n", port,
	       ticket, (unsigned long long)slab_bytes, slots);
	fflush(stdout);
	while (read(STDIN_FILENO, line, sizeof(line)) > 0)
		;
	isw_store_destroy(store);
	return 0;
}
