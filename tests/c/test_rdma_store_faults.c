/* SPDX-License-Identifier: Apache-2.0 */
/* A lease by RDMA, when its device can do less than it should, or fails. On the stub. */
#include "rdma_consumer.h"

/* Dozens of slabs: neither the answer to a consumer that comes back nor mapping looks one up. */
SCENE_TEST(test_a_reclaim_looks_nothing_up, SLABS)
{
	uint64_t looked_up, moved, probe = ISW_PAGE_BYTES; /* of the lease */
	struct mapped m[SLABS];
	struct isw_rdma_key key;

	ahead(SLABS);
	looked_up = stub.looked_up;
	moved = stub.moved;
	for (uint32_t epoch = 0; epoch < 3; epoch++) {
		come_back();
		probe += ISW_PAGE_BYTES; /* the consumer's own page */
		for (uint32_t i = 0; i < SLABS; i++) {
			if (epoch == 0)
				m[i] = map_slab(lease);
			CHECK_EQ(key_of(m[i], 1, &key), 0);
			CHECK_EQ(reach(0, true, &key), 0);
		}
		CHECK_EQ(renew(), 0);
	}
	CHECK_EQ(stub.looked_up - looked_up, probe);
	CHECK_EQ(stub.moved - moved, SLABS);
}

/* Neither moved nor freed it may be half a key: the slab has none then. */
CONNECTED_TEST(test_a_registration_that_is_half_moved, 1)
{
	struct mapped m;
	struct isw_rdma_key key;

	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	m = map_slab(lease);
	STUB_SET(mr_move_error, -EIO);
	STUB_SET(mr_free_error, -EIO);
	stub.mrs->peer = ISWI_VERBS_PEER_WRITES; /* only such ones are not freed then */
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(key_of(m, 0, &key), -EIO);
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(store_stats().rdma_connections, 0);
	STUB_SET(mr_move_error, 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	/* When it could be ended after all, the lease has RDMA again. */
	come_back();
	map_key(&key);
	CHECK_EQ(reach(0, false, &key), 0);
}

/* A device is opened once for all, closed with its last user, and opened anew when it failed. */
CONNECTED_TEST(test_a_device_that_failed_is_opened_anew, 1)
{
	uint64_t other = lease_slots(SLABS).lease;

	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(other), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(open_again(other), 0);
	CHECK_EQ(isw_store_rdma_close(store, other), 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK_EQ(stub.live, live);
}

/* What is registered with it is registered anew, before somebody waits for that. */
SCENE_TEST(test_what_a_failed_device_had_is_registered_anew, 2)
{
	uint64_t other = lease_slots(SLABS).lease;
	struct mapped m;
	struct isw_rdma_key key;

	ahead(2);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(other), -EIO);
	STUB_SET(pd_make_error, 0);
	consumer_connect(&consumer, lease);
	m = map_slab(lease);
	CHECK_EQ(key_of(m, 1, &key), -EAGAIN);
	ahead(2);
	CHECK_EQ(key_of(m, 1, &key), 0);
	CHECK_EQ(reach(0, true, &key), 0);
	/* Switched off: no device is held. */
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK(stub.live > live);
	isw_store_rdma_ahead_end(store);
	CHECK_EQ(store_stats().rdma_ahead, 0);
	CHECK_EQ(stub.live, live);
}

/* A limit is for those who use RDMA first. */
SCENE_TEST(test_what_nobody_uses_gives_way, 3)
{
	struct isw_rdma_key key;
	struct mapped m;

	/* The consumer's page and two slabs; the lease's page and its slab come instead. */
	STUB_SET(mrs_max, 3);
	map_slab(lease_slots(SLABS).lease);
	m = map_slab(lease);
	ahead(2);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOMEM);
	CHECK_EQ(unmap(m), 0);
	m = map_slab(lease);
	consumer_connect(&consumer, lease);
	CHECK_EQ(key_of(m, 0, &key), 0);
	CHECK_EQ(reach(0, true, &key), 0);
	CHECK_EQ(store_stats().rdma_ahead, 0);
	/* What is used stays, and the limit is one. */
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(key_of(map_slab(lease), 0, &key), -ENOMEM);
	STUB_SET(mrs_max, 0);
}

CONNECTED_TEST(test_what_could_be_registered_is_lent, 4)
{
	struct mapped first, m;
	struct isw_error error = {0};
	struct isw_rdma_key key;

	STUB_SET(mr_makes_left, 2);
	first = map_key(&key);
	map_key(&key);
	m = map_slab(lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, m.slot, m.generation, 0, &key, &error), -ENOMEM);
	CHECK(strstr(error.text, "ulimit -l"));
	CHECK_EQ(store_stats().rdma_failures, 1);
	CHECK_EQ(store_stats().rdma_regions, 2);
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(key_of(first, 0, &key), 0);
	CHECK_EQ(reach(0, true, &key), 0);
	/* Nor can a lease be opened then; the daemon goes on. */
	STUB_SET(mr_makes_left, 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK_EQ(isw_store_rdma_open(store, lease, consumer.ends, QUEUES, consumer.peers, &key,
				     &error),
		 -ENOMEM);
	CHECK_EQ(store_stats().rdma_connections, 0);
	STUB_SET(mr_makes_left, -1);
}

/* A device that does not end a registration: the connections end instead, and the slab is safe. */
CONNECTED_TEST(test_a_registration_that_stays, 1)
{
	struct isw_rdma_key key;
	struct mapped m = map_key(&key);

	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK(reach(0, true, &key) < 0);
	/* Its key is none for the slot's next slab. */
	for (struct mapped next = {.slot = SLABS}; next.slot != m.slot;) {
		CHECK_EQ(isw_store_scrub(store), 0);
		next = map_slab(lease);
		CHECK_EQ(key_of(next, 0, &key), -ENOTCONN);
		CHECK_EQ(unmap(next), 0);
	}
	STUB_SET(mr_free_error, 0);
}

/* Neither registration nor connections end: then the slab never becomes somebody else's. */
CONNECTED_TEST(test_a_fence_that_fails_keeps_the_slab, 1)
{
	struct isw_rdma_key key;
	struct mapped m = map_key(&key);

	STUB_SET(mr_free_error, -EBUSY);
	STUB_SET(qp_free_error, -EBUSY);
	CHECK_EQ(unmap(m), -EBUSY);
	CHECK_EQ(renew(), -EBUSY);
	CHECK_EQ(store_stats().slabs_dirty, 0);
	CHECK_EQ(isw_store_scrub(store), -ENOENT);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(renew(), 0);
}

int main(void)
{
	return run_on_rig(true);
}
