/* SPDX-License-Identifier: Apache-2.0 */
/* A store of small slabs, all made, listening on loopback. */
#ifndef ISW_TEST_STORE_FIXTURE_H
#define ISW_TEST_STORE_FIXTURE_H

#include <sys/prctl.h>

#include "isw.h"
#include "nbd_fixture.h"
#include "tests_between.h"
#include "ticket.h"

/*
 * On a quiet machine a connection that is zeroing a slab usually ends before a wait of 0 ms is
 * over. About one attempt in a hundred is not in time.
 */
#define ENDS_IN_TIME_MAX 5000u

static isw_store *store;
static uint16_t port;

struct leased {
	uint64_t lease;
	char ticket[ISW_TICKET_TEXT_BYTES];
};

struct mapped {
	uint32_t slot;
	uint64_t generation;
};

static inline struct isw_store_config config_of(uint64_t slab_bytes, uint32_t slabs)
{
	return (struct isw_store_config){
		.slab_bytes = slab_bytes,
		.slabs_max = slabs,
		.leases_max = 4,
		.connections_max =
			64, /* who dials again at once is not refused on a busy machine */
		.connections_per_lease_max = 8,
		.handshake_ms_max = WAIT_S * 1000,
		.send_ms_max = WAIT_S * 1000,
	};
}

static inline void set_up(uint64_t slab_bytes, uint32_t slabs)
{
	const struct isw_store_config config = config_of(slab_bytes, slabs);

	CHECK_EQ(isw_store_create(&config, &store, NULL), 0);
	for (uint32_t i = 0; i < slabs; i++)
		CHECK_EQ(isw_store_preallocate(store, NULL), 0);
	CHECK_EQ(isw_store_listen(store, "127.0.0.1", 0, &port, NULL), 0);
}

/* By default a wait of 0 ms lasts 50 us, in which a turn of zeroing ends. */
static inline void wait_as_told(void)
{
	CHECK_EQ(prctl(PR_SET_TIMERSLACK, 1), 0);
}

static inline void tear_down(void)
{
	isw_store_destroy(store);
}

static inline struct isw_store_stats store_stats(void)
{
	struct isw_store_stats stats;

	isw_store_stats(store, &stats);
	return stats;
}

static inline struct isw_lease_stats lease_stats(uint64_t lease)
{
	struct isw_lease_stats stats;

	CHECK_EQ(isw_store_lease_stats(store, lease, &stats), 0);
	return stats;
}

static inline struct leased lease_slots(uint32_t slots)
{
	struct leased leased;

	CHECK_EQ(lease_create(store, slots, leased.ticket, &leased.lease, NULL), 0);
	return leased;
}

static inline struct mapped map_slab(uint64_t lease)
{
	struct mapped mapped;

	CHECK_EQ(isw_store_map(store, lease, 0, &mapped.slot, &mapped.generation), 0);
	return mapped;
}

static inline void scrub_all(void)
{
	while (isw_store_scrub(store) == 0)
		;
}

/* Nothing of it is left, not even in the pool. */
static inline void give_back(uint64_t lease)
{
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
	scrub_all();
}

static inline int unmap_slab(uint64_t lease, struct mapped mapped, uint32_t wait_ms_max)
{
	return isw_store_unmap(store, lease, mapped.slot, mapped.generation, wait_ms_max);
}

#endif
