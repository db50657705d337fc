/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA devices that their host is about to remove: a kernel may wait until nobody has them open, so
 * a store must let go of all that it has there, and serve again when they are back. On the stub.
 */
#include "rdma_consumer.h"

/* Registered ahead, by a lease with connections and by one whose connections have ended. */
SCENE_TEST(test_a_device_that_is_removed, 4)
{
	uint64_t paused = lease_slots(SLABS).lease;
	int fd = open_export(port, ticket);
	struct isw_rdma_key key;
	struct consumer other;
	struct mapped m;

	consumer_make(&other);
	live = stub.live;
	consumer_connect(&other, paused);
	m = map_slab(paused);
	CHECK_EQ(isw_store_rdma_key(store, paused, m.slot, m.generation, 0, &key, NULL), 0);
	CHECK_EQ(isw_store_rdma_pause(store, paused), 0);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	consumer_connect(&consumer, lease);
	m = map_key(&key);
	memset(consumer.page, 0x4d, ISW_PAGE_BYTES);
	CHECK_EQ(reach(0, true, &key), 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(store_stats().rdma_regions, 2);
	CHECK_EQ(store_stats().rdma_ahead, 2);

	STUB_SET(leaving, true);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(stub.live, live);
	CHECK_EQ(store_stats().rdma_connections + store_stats().rdma_regions, 0);
	CHECK_EQ(store_stats().rdma_ahead, 0);
	CHECK(reach(1, true, &key) < 0);
	hear_close(fd); /* its consumer must come back, over TCP */
	close(fd);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);

	/* It is there again, and what was written before is, too. */
	STUB_SET(leaving, false);
	CHECK_EQ(renew(), 0);
	come_back();
	CHECK_EQ(key_of(m, 0, &key), 0);
	CHECK_EQ(reach(0, false, &key), 0);
	CHECK_EQ(consumer.page[ISW_PAGE_BYTES - 1], 0x4d);
	ahead(3);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	consumer_free(&other);
}

/* What cannot be ended at once is tried again. */
CONNECTED_TEST(test_what_stays_is_ended_later, 1)
{
	struct isw_rdma_key key;

	map_key(&key);
	STUB_SET(leaving, true);
	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK_EQ(store_stats().rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, live);
	STUB_SET(leaving, false);
}

/* Its slabs come back to the pool then. */
CONNECTED_TEST(test_a_lease_that_could_not_be_destroyed_is_later, 1)
{
	struct isw_rdma_key key;

	map_key(&key);
	STUB_SET(mr_free_error, -EIO);
	STUB_SET(qp_free_error, -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, lease), -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, lease), -ENOENT);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(store_stats().slabs_dirty, 0);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, live);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	CHECK_EQ(isw_store_scrub(store), 0);
	lease = lease_slots(SLABS).lease;
	come_back();
	map_key(&key);
	CHECK_EQ(reach(0, false, &key), 0);
}

/* It takes a while to end what a lease has there, and its consumer does not wait: it comes later.
 */
CONNECTED_TEST(test_what_a_failed_device_has_is_ended_beside_the_answers, 2)
{
	uint64_t other = lease_slots(SLABS).lease;
	struct isw_rdma_key key;
	struct mapped m = map_key(&key);

	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(other), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(open_again(lease), -EBUSY);
	CHECK_EQ(store_stats().rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0); /* none is being removed */
	CHECK_EQ(store_stats().rdma_regions, 0);
	CHECK_EQ(stub.live, live);
	come_back();
	CHECK_EQ(key_of(m, 0, &key), 0);
	CHECK_EQ(reach(0, true, &key), 0);
}

static void *come_and_go(void *arg)
{
	(void)arg;

	for (uint32_t i = 0; !atomic_load(&stop); i++) {
		STUB_SET(leaving, i % 2 == 0);
		isw_store_rdma_let_go(store);
	}
	return NULL;
}

SCENE_TEST(test_beside_everything_else, SLABS)
{
	void *(*const beside[])(void *) = {come_and_go, register_ahead};
	pthread_t threads[2];
	uint32_t keys = 0;

	race_begin(threads, beside, 2);
	for (uint32_t i = 0; i < 300; i++) {
		struct mapped m = map_slab(lease);
		struct isw_rdma_key key;
		int code = open_again(lease);

		CHECK(code == 0 || code == -EBUSY);
		code = key_of(m, 0, &key);
		CHECK(code == 0 || code == -ENOTCONN);
		keys += code == 0;
		CHECK_EQ(unmap(m), 0);
		CHECK_EQ(isw_store_scrub(store), 0);
	}
	CHECK(keys > 0);
	race_end(threads, 2);
	STUB_SET(leaving, false);
}

int main(void)
{
	return run_on_rig(true);
}
