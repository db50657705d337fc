/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA devices that their host is about to remove: a kernel may wait until nobody has them open, so
 * a store must let go of all that it has there, and serve again when they are back. On the stub.
 */
#include "rdma_consumer.h"

#define LONG_MS (WAIT_S * 1000u)

/* Registered ahead, by a lease with connections and by one whose connections have ended. */
static void test_a_device_that_is_removed(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 4);
	uint64_t paused = lease_slots(&s.f, SLABS).lease;
	int fd = open_export(s.f.port, s.token);
	struct isw_rdma_key key;
	struct consumer other;
	struct mapped m;

	consumer_make(&other);
	s.live = stub.live;
	consumer_connect(&other, store, paused);
	m = map_slab(&s.f, paused);
	CHECK_EQ(isw_store_rdma_key(store, paused, m.slot, m.generation, 0, &key, NULL), 0);
	CHECK_EQ(isw_store_rdma_pause(store, paused), 0);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	consumer_connect(&s.c, store, s.lease);
	m = map_key(&s, &key);
	memset(s.c.page, 0x4d, ISW_PAGE_BYTES);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 2);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 2);

	STUB_SET(leaving, true);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(stub.live, s.live);
	CHECK_EQ(stats_of(&s.f).rdma_connections + stats_of(&s.f).rdma_regions, 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 0);
	CHECK(reach(&s, 1, true, &key) < 0);
	hear_close(fd); /* its consumer must come back, over TCP */
	close(fd);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);

	/* It is there again, and what was written before is, too. */
	STUB_SET(leaving, false);
	CHECK_EQ(isw_store_lease_renew(store, s.lease, LONG_MS, s.token), 0);
	come_back(&s);
	CHECK_EQ(key_of(&s, m, 0, &key), 0);
	CHECK_EQ(reach(&s, 0, false, &key), 0);
	CHECK_EQ(s.c.page[ISW_PAGE_BYTES - 1], 0x4d);
	for (uint32_t i = 0; i < 3; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	consumer_free(&other);
	scene_end(&s);
}

/* What cannot be ended at once is tried again. */
static void test_what_stays_is_ended_later(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct isw_rdma_key key;

	map_key(&s, &key);
	STUB_SET(leaving, true);
	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, s.live);
	STUB_SET(leaving, false);
	scene_end(&s);
}

/* Its slabs come back to the pool then. */
static void test_a_lease_that_could_not_be_destroyed_is_later(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct isw_rdma_key key;

	map_key(&s, &key);
	STUB_SET(mr_free_error, -EIO);
	STUB_SET(qp_free_error, -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, s.lease), -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, s.lease), -ENOENT);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stats_of(&s.f).slabs_dirty, 0);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, s.live);
	CHECK_EQ(stats_of(&s.f).slabs_dirty, 1);
	CHECK_EQ(isw_store_scrub(store), 0);
	s.lease = lease_slots(&s.f, SLABS).lease;
	come_back(&s);
	map_key(&s, &key);
	CHECK_EQ(reach(&s, 0, false, &key), 0);
	scene_end(&s);
}

/* It takes a while to end what a lease has there, and its consumer does not wait: it comes later.
 */
static void test_what_a_failed_device_has_is_ended_beside_the_answers(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 2);
	uint64_t other = lease_slots(&s.f, SLABS).lease;
	struct mapped m;
	struct isw_rdma_key key;

	m = map_key(&s, &key);
	CHECK_EQ(isw_store_rdma_pause(store, s.lease), 0);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(&s, other), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(open_again(&s, s.lease), -EBUSY);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0); /* none is being removed */
	CHECK_EQ(stats_of(&s.f).rdma_regions, 0);
	CHECK_EQ(stub.live, s.live);
	come_back(&s);
	CHECK_EQ(key_of(&s, m, 0, &key), 0);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	scene_end(&s);
}

static void *come_and_go(void *arg)
{
	struct scene *s = arg;

	for (uint32_t i = 0; !atomic_load(&s->stop); i++) {
		STUB_SET(leaving, i % 2 == 0);
		isw_store_rdma_let_go(s->f.store);
	}
	return NULL;
}

static void test_beside_everything_else(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, SLABS);
	pthread_t threads[2];
	uint32_t keys = 0;

	CHECK_EQ(pthread_create(&threads[0], NULL, come_and_go, &s), 0);
	CHECK_EQ(pthread_create(&threads[1], NULL, register_ahead, &s), 0);
	for (uint32_t i = 0; i < 300; i++) {
		struct mapped m = map_slab(&s.f, s.lease);
		struct isw_rdma_key key;
		int code = open_again(&s, s.lease);

		CHECK(code == 0 || code == -EBUSY);
		code = key_of(&s, m, 0, &key);
		CHECK(code == 0 || code == -ENOTCONN);
		keys += code == 0;
		CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
		CHECK_EQ(isw_store_scrub(store), 0);
	}
	CHECK(keys > 0);
	race_end(&s, threads, 2);
	STUB_SET(leaving, false);
}

int main(void)
{
	verbs = &stub_verbs;
	host = "127.0.0.1";
	stub_start();
	test_a_device_that_is_removed();
	test_what_stays_is_ended_later();
	test_a_lease_that_could_not_be_destroyed_is_later();
	test_what_a_failed_device_has_is_ended_beside_the_answers();
	test_beside_everything_else();
	stub_stop();
	return 0;
}
