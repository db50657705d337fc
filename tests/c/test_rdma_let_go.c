/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA devices that their host is about to remove: a kernel may wait until nobody has them open, so
 * a store must let go of all that it has there, and serve again when they are back. On the stub.
 */
#include "nbd_fixture.h"
#include "rdma_consumer.h"

#define LONG_MS (WAIT_S * 1000u)

/* Registered ahead, by a lease with connections and by one whose connections have ended. */
static void test_a_device_that_is_removed(void)
{
	isw_store *store = store_make(4);
	char token[ISW_TOKEN_TEXT_BYTES];
	uint64_t lease, paused = lease_make(store), generation[2];
	struct isw_rdma_key key;
	struct consumer c, other;
	uint32_t slot;
	uint16_t port;
	int fd, live;

	CHECK_EQ(isw_store_listen(store, "127.0.0.1", 0, &port, NULL), 0);
	CHECK_EQ(isw_store_lease_create(store, SLABS, token, &lease, NULL), 0);
	fd = open_export(port, token);
	consumer_make(&c);
	consumer_make(&other);
	live = stub.live;
	consumer_connect(&other, store, paused);
	map_slab(store, paused, &generation[0], &key);
	CHECK_EQ(isw_store_rdma_pause(store, paused), 0);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	consumer_connect(&c, store, lease);
	slot = map_slab(store, lease, &generation[1], &key);
	memset(c.page, 0x4d, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stats_of(store).rdma_regions, 2);
	CHECK_EQ(stats_of(store).rdma_ahead, 2);

	STUB_SET(leaving, true);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(stub.live, live);
	CHECK_EQ(stats_of(store).rdma_connections + stats_of(store).rdma_regions, 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 0);
	CHECK(transfer(&c, 1, true, key.address, key.rkey) < 0);
	hear_close(fd); /* its consumer must come back, over TCP */
	close(fd);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);

	/* It is there again, and what was written before is, too. */
	STUB_SET(leaving, false);
	CHECK_EQ(isw_store_lease_renew(store, lease, LONG_MS, token), 0);
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation[1], 0, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey), 0);
	CHECK_EQ(c.page[ISW_PAGE_BYTES - 1], 0x4d);
	for (uint32_t i = 0; i < 3; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	consumer_free(&c);
	consumer_free(&other);
	isw_store_destroy(store);
}

/* What cannot be ended at once is tried again. */
static void test_what_stays_is_ended_later(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;
	int live;

	consumer_make(&c);
	live = stub.live;
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &key);
	STUB_SET(leaving, true);
	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(isw_store_rdma_let_go(store), 1);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK_EQ(stats_of(store).rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, live);
	STUB_SET(leaving, false);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* Its slabs come back to the pool then. */
static void test_a_lease_that_could_not_be_destroyed_is_later(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;
	int live;

	consumer_make(&c);
	live = stub.live;
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &key);
	STUB_SET(mr_free_error, -EIO);
	STUB_SET(qp_free_error, -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, lease), -EIO);
	CHECK_EQ(isw_store_lease_destroy(store, lease), -ENOENT);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stats_of(store).slabs_dirty, 0);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(isw_store_rdma_let_go(store), 0);
	CHECK_EQ(stub.live, live);
	CHECK_EQ(stats_of(store).slabs_dirty, 1);
	CHECK_EQ(isw_store_scrub(store), 0);
	lease = lease_make(store);
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &key);
	CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* It takes a while to end what a lease has there, and its consumer does not wait: it comes later.
 */
static void test_what_a_failed_device_has_is_ended_beside_the_answers(void)
{
	isw_store *store = store_make(2);
	uint64_t lease = lease_make(store), other = lease_make(store), generation;
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;
	int live;

	consumer_make(&c);
	live = stub.live;
	consumer_connect(&c, store, lease);
	slot = map_slab(store, lease, &generation, &key);
	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(isw_store_rdma_open(store, other, c.ends, QUEUES, peers, &key, NULL), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(isw_store_rdma_open(store, lease, c.ends, QUEUES, peers, &key, NULL), -EBUSY);
	CHECK_EQ(stats_of(store).rdma_regions, 1);
	CHECK_EQ(isw_store_rdma_let_go(store), 0); /* none is being removed */
	CHECK_EQ(stats_of(store).rdma_regions, 0);
	CHECK_EQ(stub.live, live);
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

static void *come_and_go(void *arg)
{
	struct race *race = arg;

	for (uint32_t i = 0; !atomic_load(&race->stop); i++) {
		STUB_SET(leaving, i % 2 == 0);
		isw_store_rdma_let_go(race->store);
	}
	return NULL;
}

static void test_beside_everything_else(void)
{
	struct race race = {.store = store_make(SLABS)};
	struct isw_rdma_end peers[QUEUES];
	pthread_t threads[2];
	struct consumer c;
	uint32_t keys = 0;

	race.lease = lease_make(race.store);
	consumer_make(&c);
	CHECK_EQ(pthread_create(&threads[0], NULL, come_and_go, &race), 0);
	CHECK_EQ(pthread_create(&threads[1], NULL, register_ahead, &race), 0);
	for (uint32_t i = 0; i < 300; i++) {
		struct isw_rdma_key key;
		uint64_t generation;
		uint32_t slot;
		int code;

		CHECK_EQ(isw_store_map(race.store, race.lease, i, &slot, &generation), 0);
		code = isw_store_rdma_open(race.store, race.lease, c.ends, QUEUES, peers, &key,
					   NULL);
		CHECK(code == 0 || code == -EBUSY);
		code = isw_store_rdma_key(race.store, race.lease, slot, generation, 0, &key, NULL);
		CHECK(code == 0 || code == -ENOTCONN);
		keys += code == 0;
		CHECK_EQ(isw_store_unmap(race.store, race.lease, slot, generation, 100), 0);
		CHECK_EQ(isw_store_scrub(race.store), 0);
	}
	atomic_store(&race.stop, true);
	for (uint32_t i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	CHECK(keys > 0);
	CHECK_EQ(stats_of(race.store).rdma_regions, 0);
	STUB_SET(leaving, false);
	consumer_free(&c);
	isw_store_destroy(race.store);
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
