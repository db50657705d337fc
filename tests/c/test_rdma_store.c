/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lease by RDMA: who reaches which slab, and until when. The consumer is bare verbs that does as
 * it pleases. On the stub, or, with ISW_TEST_RDMA_HOST, on this host's own devices.
 */
#include "rdma_consumer.h"

SCENE_TEST(test_a_slab_is_reached_until_it_is_unmapped, 2)
{
	struct mapped m = map_slab(lease);
	struct isw_rdma_key key, again;

	CHECK_EQ(key_of(m, 0, &key), -ENOTCONN);
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	consumer_connect(&consumer, lease);
	CHECK_EQ(lease_stats(lease).rdma_connections, QUEUES);
	m = map_key(&key);
	CHECK_EQ(key_of(m, 0, &again), 0);
	CHECK_EQ(again.rkey, key.rkey);
	CHECK_EQ(key_of((struct mapped){m.slot, m.generation + 1}, 0, &again), -ESTALE);
	CHECK_EQ(key_of((struct mapped){SLABS, m.generation}, 0, &again), -ESTALE);
	CHECK_EQ(store_stats().rdma_regions, 1);
	memset(consumer.page, 0x5a, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&consumer, 0, true, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	memset(consumer.page, 0, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&consumer, 1, false, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	CHECK_EQ(consumer.page[ISW_PAGE_BYTES - 1], 0x5a);
	/* Whatever the consumer does: the key is dead, and the slab is zeroed for the next. */
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(store_stats().rdma_regions, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(reach(0, true, &key), -EACCES);
	/* A new key for the next use of the very memory. */
	for (uint32_t i = 0; i < 2; i++) {
		map_key(&again);
		CHECK(again.rkey != key.rkey);
	}
	CHECK_EQ(store_stats().read_requests + store_stats().write_requests, 0);
}

CONNECTED_TEST(test_out_of_bounds_and_the_probe_are_refused, 1)
{
	struct isw_rdma_key key;
	struct mapped m = map_key(&key);

	for (uint32_t attack = 0; attack < 4; attack++) {
		const struct {
			bool write;
			struct isw_rdma_key key;
		} attacks[] = {
			{true, {key.address + SLAB_BYTES - 8, key.rkey}},
			{false, {key.address - 8, key.rkey}},
			{true, consumer.probe},
			{false, {key.address, key.rkey + 1}},
		};

		CHECK_EQ(reach(0, false, &consumer.probe), 0);
		CHECK_EQ(reach(0, attacks[attack].write, &attacks[attack].key), -EACCES);
		/* Only that connection has ended. */
		CHECK_EQ(reach(1, false, &key), 0);
		CHECK_EQ(isw_store_rdma_close(store, lease), 0);
		come_back();
		CHECK_EQ(key_of(m, 0, &key), 0);
	}
}

CONNECTED_TEST(test_a_neighbours_key_is_useless, 2)
{
	struct consumer neighbour;
	struct isw_rdma_key key;

	consumer_make(&neighbour);
	consumer_connect(&neighbour, lease_slots(SLABS).lease);
	map_key(&key);
	CHECK_EQ(transfer(&neighbour, 0, false, key.address, key.rkey), -EACCES);
	CHECK_EQ(transfer(&neighbour, 1, true, key.address, key.rkey), -EACCES);
	CHECK_EQ(reach(0, false, &key), 0);
	CHECK(all_bytes(consumer.page, 0, ISW_PAGE_BYTES));
	consumer_free(&neighbour);
}

/* The old epoch's connections are dead before the new one is granted; what they reached is not. */
CONNECTED_TEST(test_a_renewal_ends_the_connections, 1)
{
	struct isw_rdma_key key, fresh;
	struct mapped m = map_key(&key);

	memset(consumer.page, 0x77, ISW_PAGE_BYTES);
	CHECK_EQ(reach(0, true, &key), 0);
	CHECK_EQ(renew(), 0);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK(reach(1, true, &key) < 0);
	CHECK_EQ(key_of(m, 0, &fresh), -ENOTCONN);
	/* It is at hand for the new epoch: nobody waits for a registration. */
	come_back();
	CHECK_EQ(key_of(m, 1, &fresh), 0);
	CHECK_EQ(reach(0, false, &fresh), 0);
	CHECK_EQ(consumer.page[0], 0x77);
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), -ENOENT);
	CHECK_EQ(store_stats().rdma_regions, 0);
}

/* What it has sent before must not meet the slot's next slab, whatever key that gets. */
CONNECTED_TEST(test_a_slab_taken_by_force_ends_the_connections, 2)
{
	struct isw_rdma_key key, other;
	struct mapped kept = map_key(&other), taken = map_key(&key);

	CHECK_EQ(reach(0, false, &other), 0);
	CHECK_EQ(unmap_slab(lease, taken, 0), 0);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK_EQ(store_stats().rdma_regions, 1);
	CHECK(reach(0, true, &other) < 0);
	CHECK(reach(1, true, &key) < 0);
	CHECK_EQ(key_of(kept, 0, &key), -ENOTCONN);
	come_back();
	CHECK_EQ(key_of(kept, 0, &other), 0);
	CHECK_EQ(reach(0, false, &other), 0);
}

/* The lease has its registrations, but pages go over TCP: that is the fence then. */
CONNECTED_TEST(test_without_rdma_connections_force_leaves_those_of_tcp, 3)
{
	int fd = open_export(port, ticket);
	char page[ISW_PAGE_BYTES];
	struct isw_rdma_key key;
	struct mapped m = map_key(&key);

	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	CHECK_EQ(unmap_slab(lease, m, 0), 0);
	m = map_slab(lease);
	CHECK_EQ(do_read(fd, m.slot * SLAB_BYTES, page, sizeof(page)), 0);
	/* With connections they go, too; and so they do with all that is registered. */
	for (uint32_t whole = 0; whole < 2; whole++) {
		come_back();
		if (whole)
			CHECK_EQ(isw_store_rdma_close(store, lease), 0);
		else
			CHECK_EQ(unmap_slab(lease, m, 0), 0);
		await_close(fd);
		CHECK_EQ(renew(), 0);
		fd = open_export(port, ticket);
	}
	close(fd);
}

SCENE_TEST(test_nonsense_is_refused, 1)
{
	const struct {
		uint32_t ends;
		uint64_t lease;
		int code;
	} cases[] = {
		{0, lease, -EINVAL},
		{ISW_RDMA_QUEUES_MAX + 1, lease, -EINVAL},
		{1, lease + 1, -ENOENT},
		{2, lease, -EINVAL},
	};
	struct isw_rdma_key probe;

	consumer.ends[1].psn = 1u << 30;
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++)
		CHECK_EQ(isw_store_rdma_open(store, cases[i].lease, consumer.ends, cases[i].ends,
					     consumer.peers, &probe, NULL),
			 cases[i].code);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
}

/* Soft-RoCE cannot before Linux 6.5. */
static bool moves;

/* The tests in virtual machines read what it prints. */
TEST(test_a_device_can_move_registrations_or_says_that_it_cannot)
{
	struct iswi_verbs_key key;
	struct iswi_vmr *mr;
	struct iswi_vpd *pd;
	struct consumer c;
	int code;

	consumer_make(&c);
	CHECK_EQ(rig_verbs()->pd_make(c.dev, &pd), 0);
	CHECK_EQ(rig_verbs()->mr_make(pd, c.page, ISW_PAGE_BYTES, 0, &mr, &key), 0);
	code = rig_verbs()->mr_move(mr, c.pd, ISWI_VERBS_PEER_READS, &key);
	CHECK(code == 0 || code == -EOPNOTSUPP);
	moves = code == 0;
	printf("registrations %s be moved\n", moves ? "can" : "cannot");
	CHECK_EQ(rig_verbs()->mr_free(mr), 0);
	rig_verbs()->pd_free(pd);
	consumer_free(&c);
}

/*
 * Registered when nobody waits for it; a key to it is nobody's before it is mapped. Only where
 * registrations can be moved.
 */
SCENE_TEST(test_a_slab_is_registered_ahead, 3)
{
	struct isw_rdma_key key, again;
	struct mapped m;

	if (!moves)
		return;
	ahead(2);
	CHECK_EQ(store_stats().rdma_ahead, 2);
	/* Who has no use for it gets the third. */
	map_slab(lease_slots(SLABS).lease);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0); /* it may want it later */
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	CHECK_EQ(store_stats().rdma_ahead, 3);
	consumer_connect(&consumer, lease);
	m = map_slab(lease);
	CHECK_EQ(key_of(m, 1, &key), 0);
	CHECK_EQ(store_stats().rdma_ahead, 2);
	CHECK_EQ(store_stats().rdma_regions, 1);
	memset(consumer.page, 0x3c, ISW_PAGE_BYTES);
	CHECK_EQ(reach(0, true, &key), 0);
	/* Taken back while the connections live, its key is dead, and it is registered again. */
	CHECK_EQ(unmap(m), 0);
	CHECK_EQ(store_stats().rdma_ahead, 2);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK(reach(0, true, &key) < 0);
	/* Another lease's by now: nothing of before is there, and nobody else's key opens it. */
	m = map_slab(lease);
	CHECK_EQ(key_of(m, 1, &again), 0);
	CHECK(again.rkey != key.rkey);
	CHECK_EQ(reach(1, false, &again), 0);
	CHECK_EQ(consumer.page[0], 0);
	CHECK_EQ(renew(), 0);
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
	CHECK_EQ(store_stats().rdma_ahead, 2);
	CHECK_EQ(store_stats().rdma_regions, 0);
	/* Given back to the host none is registered any more; the other lease's is. */
	while (isw_store_release_free(store) == 0)
		;
	CHECK_EQ(store_stats().rdma_ahead, 1);
}

SCENE_TEST(test_what_is_not_registered_is_not_waited_for, 2)
{
	struct mapped m = map_slab(lease);
	struct isw_rdma_key key;

	consumer_connect(&consumer, lease);
	CHECK_EQ(key_of(m, 1, &key), -EAGAIN);
	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	CHECK_EQ(store_stats().rdma_connections, 0);
	CHECK_EQ(key_of(m, 1, &key), -ENOTCONN);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	come_back();
	if (!moves)
		CHECK_EQ(key_of(m, 1, &key), -EAGAIN);
	CHECK_EQ(key_of(m, moves, &key), 0);
	CHECK_EQ(reach(0, false, &key), 0);
	CHECK_EQ(isw_store_rdma_pause(store, lease + 1), -ENOENT);
}

/*
 * A device that cannot move a registration makes a new one; only the time is lost. The stub, told
 * so, or a real one that cannot.
 */
CONNECTED_TEST(test_a_registration_that_cannot_be_moved, 1)
{
	struct isw_rdma_key key;
	struct mapped m;
	uint64_t looked_up;

	if (!rig_on_stub() && moves)
		return;
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	STUB_SET(mr_move_error, -EOPNOTSUPP);
	/* Somebody who does not wait is told so, and nothing is registered in vain any more. */
	m = map_slab(lease);
	looked_up = stub.looked_up;
	for (uint32_t i = 0; i < 2; i++) {
		CHECK_EQ(key_of(m, 1, &key), -EAGAIN);
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	}
	CHECK_EQ(stub.looked_up, looked_up);
	CHECK_EQ(key_of(m, 0, &key), 0);
	CHECK_EQ(key_of(m, 1, &key), 0);
	CHECK_EQ(reach(0, true, &key), 0);
	CHECK_EQ(unmap_slab(lease, m, 0), 0);
	CHECK_EQ(store_stats().rdma_regions + store_stats().rdma_ahead, 0);
	STUB_SET(mr_move_error, 0);
}

/* Registers whatever is mapped, over and over. */
static void *register_all(void *arg)
{
	(void)arg;
	struct isw_slot_info info;
	struct isw_rdma_key key;

	while (!atomic_load(&stop))
		for (uint32_t i = 0; isw_store_lease_slot(store, lease, i, &info) == 0;
		     i = info.slot + 1) {
			int code = key_of((struct mapped){info.slot, info.generation}, 0, &key);

			CHECK(code == 0 || code == -ESTALE || code == -ENOTCONN);
		}
	return NULL;
}

/* Opens and closes beside it. */
static void *open_and_close(void *arg)
{
	(void)arg;
	while (!atomic_load(&stop)) {
		int code = open_again(lease);

		CHECK(code == 0 || code == -EBUSY);
		if (code == 0)
			CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	}
	return NULL;
}

SCENE_TEST(test_mapping_registering_and_renewing_at_once, SLABS)
{
	void *(*const beside[])(void *) = {register_all, open_and_close, register_ahead};
	pthread_t threads[ISWI_ARRAY_LEN(beside)];

	race_begin(threads, beside, ISWI_ARRAY_LEN(beside));
	for (uint32_t i = 0; i < 300; i++) {
		struct mapped m = map_slab(lease);

		if (i % 7 == 0)
			CHECK_EQ(renew(), 0);
		CHECK_EQ(unmap(m), 0);
		/* Zeroed while nobody can reach it: a registration that is left would be a race. */
		CHECK_EQ(isw_store_scrub(store), 0);
	}
	race_end(threads, ISWI_ARRAY_LEN(beside));
}

int main(void)
{
	return run_on_rig(false);
}
