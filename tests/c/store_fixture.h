/* SPDX-License-Identifier: Apache-2.0 */
/* A store of small slabs, all made, listening on loopback. */
#ifndef ISW_TEST_STORE_FIXTURE_H
#define ISW_TEST_STORE_FIXTURE_H

#include "isw.h"
#include "nbd_fixture.h"

struct fixture {
	isw_store *store;
	uint64_t slab_bytes;
	uint16_t port;
};

struct leased {
	uint64_t lease;
	char token[ISW_TOKEN_TEXT_BYTES];
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
		.connections_max = 16,
		.connections_per_lease_max = 8,
		.handshake_ms_max = WAIT_S * 1000,
		.send_ms_max = WAIT_S * 1000,
	};
}

static inline void set_up(struct fixture *f, uint64_t slab_bytes, uint32_t slabs)
{
	const struct isw_store_config config = config_of(slab_bytes, slabs);

	f->slab_bytes = slab_bytes;
	CHECK_EQ(isw_store_create(&config, &f->store, NULL), 0);
	for (uint32_t i = 0; i < slabs; i++)
		CHECK_EQ(isw_store_preallocate(f->store, NULL), 0);
	CHECK_EQ(isw_store_listen(f->store, "127.0.0.1", 0, &f->port, NULL), 0);
}

static inline void tear_down(struct fixture *f)
{
	isw_store_destroy(f->store);
}

static inline struct isw_store_stats stats_of(const struct fixture *f)
{
	struct isw_store_stats stats;

	isw_store_stats(f->store, &stats);
	return stats;
}

static inline struct isw_lease_stats lease_stats_of(const struct fixture *f, uint64_t lease)
{
	struct isw_lease_stats stats;

	CHECK_EQ(isw_store_lease_stats(f->store, lease, &stats), 0);
	return stats;
}

static inline struct leased lease_slots(const struct fixture *f, uint32_t slots)
{
	struct leased leased;

	CHECK_EQ(isw_store_lease_create(f->store, slots, leased.token, &leased.lease, NULL), 0);
	return leased;
}

static inline struct mapped map_slab(const struct fixture *f, uint64_t lease)
{
	struct mapped mapped;

	CHECK_EQ(isw_store_map(f->store, lease, 0, &mapped.slot, &mapped.generation), 0);
	return mapped;
}

/* Nothing of it is left, not even in the pool. */
static inline void give_back(const struct fixture *f, uint64_t lease)
{
	CHECK_EQ(isw_store_lease_destroy(f->store, lease), 0);
	while (isw_store_scrub(f->store) == 0)
		;
}

static inline int unmap_slab(const struct fixture *f, uint64_t lease, struct mapped mapped,
			     uint32_t wait_ms_max)
{
	return isw_store_unmap(f->store, lease, mapped.slot, mapped.generation, wait_ms_max);
}

#endif
