/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lease by RDMA: who reaches which slab, and until when. The consumer is bare verbs that does as
 * it pleases. On the stub, or, with ISW_TEST_RDMA_HOST, on this host's own devices.
 */
#include "nbd_fixture.h"
#include "rdma_consumer.h"

static void test_a_slab_is_reached_until_it_is_unmapped(void)
{
	isw_store *store = store_make(2);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key, again;
	struct isw_lease_stats stats;
	struct consumer c;
	uint32_t slot;

	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &key, NULL), -ENOTCONN);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_lease_stats(store, lease, &stats), 0);
	CHECK_EQ(stats.rdma_connections, QUEUES);
	slot = map_slab(store, lease, &generation, &key);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &again, NULL), 0);
	CHECK_EQ(again.rkey, key.rkey);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation + 1, 0, &again, NULL), -ESTALE);
	CHECK_EQ(isw_store_rdma_key(store, lease, SLABS, generation, 0, &again, NULL), -ESTALE);
	CHECK_EQ(stats_of(store).rdma_regions, 1);
	memset(c.page, 0x5a, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&c, 0, true, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	memset(c.page, 0, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&c, 1, false, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	CHECK_EQ(c.page[ISW_PAGE_BYTES - 1], 0x5a);
	/* Whatever the consumer does: the key is dead, and the slab is zeroed for the next. */
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(stats_of(store).rdma_regions, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), -EACCES);
	/* A new key for the next use of the very memory. */
	for (uint32_t i = 0; i < 2; i++) {
		map_slab(store, lease, &generation, &again);
		CHECK(again.rkey != key.rkey);
	}
	CHECK_EQ(stats_of(store).read_requests + stats_of(store).write_requests, 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

static void test_out_of_bounds_and_the_probe_are_refused(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;

	for (uint32_t attack = 0; attack < 4; attack++) {
		consumer_make(&c);
		consumer_connect(&c, store, lease);
		if (attack == 0)
			map_slab(store, lease, &generation, &key);
		else
			CHECK_EQ(isw_store_rdma_key(store, lease, 0, generation, 0, &key, NULL), 0);
		CHECK_EQ(transfer(&c, 0, false, c.probe.address, c.probe.rkey), 0);
		if (attack == 0)
			CHECK_EQ(transfer(&c, 0, true, key.address + SLAB_BYTES - 8, key.rkey),
				 -EACCES);
		else if (attack == 1)
			CHECK_EQ(transfer(&c, 0, false, key.address - 8, key.rkey), -EACCES);
		else if (attack == 2)
			CHECK_EQ(transfer(&c, 0, true, c.probe.address, c.probe.rkey), -EACCES);
		else
			CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey + 1), -EACCES);
		/* Only that connection has ended. */
		CHECK_EQ(transfer(&c, 1, false, key.address, key.rkey), 0);
		consumer_free(&c);
		CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	}
	isw_store_destroy(store);
}

static void test_a_neighbours_key_is_useless(void)
{
	isw_store *store = store_make(2);
	uint64_t mine = lease_make(store), other = lease_make(store), generation;
	struct consumer c, neighbour;
	struct isw_rdma_key key;

	consumer_make(&c);
	consumer_make(&neighbour);
	consumer_connect(&c, store, mine);
	consumer_connect(&neighbour, store, other);
	map_slab(store, mine, &generation, &key);
	CHECK_EQ(transfer(&neighbour, 0, false, key.address, key.rkey), -EACCES);
	CHECK_EQ(transfer(&neighbour, 1, true, key.address, key.rkey), -EACCES);
	CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey), 0);
	for (uint32_t i = 0; i < ISW_PAGE_BYTES; i++)
		CHECK_EQ(c.page[i], 0);
	consumer_free(&c);
	consumer_free(&neighbour);
	isw_store_destroy(store);
}

/* The old epoch's connections are dead before the new one is granted; what they reached is not. */
static void test_a_renewal_ends_the_connections(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_rdma_key key, fresh;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	slot = map_slab(store, lease, &generation, &key);
	memset(c.page, 0x77, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	CHECK_EQ(isw_store_lease_renew(store, lease, 1000, token), 0);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK(transfer(&c, 1, true, key.address, key.rkey) < 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &fresh, NULL), -ENOTCONN);
	consumer_free(&c);
	/* It is at hand for the new epoch: nobody waits for a registration. */
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &fresh, NULL), 0);
	CHECK_EQ(transfer(&c, 0, false, fresh.address, fresh.rkey), 0);
	CHECK_EQ(c.page[0], 0x77);
	consumer_free(&c);
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), -ENOENT);
	CHECK_EQ(stats_of(store).rdma_regions, 0);
	isw_store_destroy(store);
}

/* What it has sent before must not meet the slot's next slab, whatever key that gets. */
static void test_a_slab_taken_by_force_ends_the_connections(void)
{
	isw_store *store = store_make(2);
	uint64_t lease = lease_make(store), generation, taken;
	struct isw_rdma_key key, other;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &other);
	slot = map_slab(store, lease, &taken, &key);
	CHECK_EQ(transfer(&c, 0, false, other.address, other.rkey), 0);
	CHECK_EQ(isw_store_unmap(store, lease, slot, taken, 0), 0);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK_EQ(stats_of(store).rdma_regions, 1);
	CHECK(transfer(&c, 0, true, other.address, other.rkey) < 0);
	CHECK(transfer(&c, 1, true, key.address, key.rkey) < 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, 0, generation, 0, &key, NULL), -ENOTCONN);
	/* It comes back with others. */
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, 0, generation, 0, &other, NULL), 0);
	CHECK_EQ(transfer(&c, 0, false, other.address, other.rkey), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* The lease has its registrations, but pages go over TCP: that is the fence then. */
static void test_without_rdma_connections_force_leaves_those_of_tcp(void)
{
	isw_store *store = store_make(3);
	char token[ISW_TOKEN_TEXT_BYTES], page[ISW_PAGE_BYTES];
	uint64_t lease, generation;
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;
	uint16_t port;
	int fd;

	CHECK_EQ(isw_store_listen(store, "127.0.0.1", 0, &port, NULL), 0);
	CHECK_EQ(isw_store_lease_create(store, SLABS, token, &lease, NULL), 0);
	fd = open_export(port, token);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &key);
	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	CHECK_EQ(isw_store_unmap(store, lease, 0, generation, 0), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(do_read(fd, slot * SLAB_BYTES, page, sizeof(page)), 0);
	/* With connections they go, too; and so they do with all that is registered. */
	for (uint32_t whole = 0; whole < 2; whole++) {
		consumer_free(&c);
		consumer_make(&c);
		consumer_connect(&c, store, lease);
		if (whole)
			CHECK_EQ(isw_store_rdma_close(store, lease), 0);
		else
			CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 0), 0);
		hear_close(fd);
		close(fd);
		CHECK_EQ(isw_store_lease_renew(store, lease, 1000, token), 0);
		fd = open_export(port, token);
	}
	close(fd);
	consumer_free(&c);
	isw_store_destroy(store);
}

static void test_nonsense_is_refused(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store);
	struct isw_error error = {0};
	struct isw_rdma_end ends[2];
	struct isw_rdma_key probe;
	struct consumer c;

	consumer_make(&c);
	memcpy(ends, c.ends, sizeof(ends));
	CHECK_EQ(isw_store_rdma_open(store, lease, ends, 0, c.peers, &probe, &error), -EINVAL);
	CHECK_EQ(isw_store_rdma_open(store, lease, ends, ISW_RDMA_QUEUES_MAX + 1, c.peers, &probe,
				     &error),
		 -EINVAL);
	CHECK_EQ(isw_store_rdma_open(store, lease + 1, ends, 1, c.peers, &probe, &error), -ENOENT);
	ends[1].psn = 1u << 30;
	CHECK_EQ(isw_store_rdma_open(store, lease, ends, 2, c.peers, &probe, &error), -EINVAL);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* Whether the device can move a registration. Soft-RoCE cannot before Linux 6.5. */
static bool moves_registrations(void)
{
	struct iswi_verbs_key key;
	struct iswi_vmr *mr;
	struct consumer c;
	struct iswi_vpd *pd;
	int code;

	consumer_make(&c);
	CHECK_EQ(verbs->pd_make(c.dev, &pd), 0);
	CHECK_EQ(verbs->mr_make(pd, c.page, ISW_PAGE_BYTES, 0, &mr, &key), 0);
	code = verbs->mr_move(mr, c.pd, ISWI_VERBS_PEER_READS, &key);
	CHECK(code == 0 || code == -EOPNOTSUPP);
	CHECK_EQ(verbs->mr_free(mr), 0);
	verbs->pd_free(pd);
	consumer_free(&c);
	return code == 0;
}

/*
 * Registered when nobody waits for it; a key to it is nobody's before it is mapped. Only where
 * registrations can be moved.
 */
static void test_a_slab_is_registered_ahead(void)
{
	isw_store *store = store_make(3);
	uint64_t lease = lease_make(store), tcp = lease_make(store), generation;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_rdma_key key, again;
	struct consumer c;
	uint32_t slot;

	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 2);
	/* Who has no use for it gets the third. */
	CHECK_EQ(isw_store_map(store, tcp, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0); /* it may want it later */
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	CHECK_EQ(stats_of(store).rdma_ahead, 3);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 2);
	CHECK_EQ(stats_of(store).rdma_regions, 1);
	memset(c.page, 0x3c, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	/* Taken back while the connections live, its key is dead, and it is registered again. */
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 2);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK(transfer(&c, 0, true, key.address, key.rkey) < 0);
	/* Another lease's by now: nothing of before is there, and nobody else's key opens it. */
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &again, NULL), 0);
	CHECK(again.rkey != key.rkey);
	CHECK_EQ(transfer(&c, 1, false, again.address, again.rkey), 0);
	CHECK_EQ(c.page[0], 0);
	CHECK_EQ(isw_store_lease_renew(store, lease, 1000, token), 0);
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 2);
	CHECK_EQ(stats_of(store).rdma_regions, 0);
	consumer_free(&c);
	/* Given back to the host none is registered any more; the other lease's is. */
	while (isw_store_release_free(store) == 0)
		;
	CHECK_EQ(stats_of(store).rdma_ahead, 1);
	isw_store_destroy(store);
}

static void test_what_is_not_registered_is_not_waited_for(bool moves)
{
	isw_store *store = store_make(2);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), -EAGAIN);
	CHECK_EQ(isw_store_rdma_pause(store, lease), 0);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), -ENOTCONN);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	if (!moves)
		CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL),
			 -EAGAIN);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, moves, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey), 0);
	consumer_free(&c);
	CHECK_EQ(isw_store_rdma_pause(store, lease + 1), -ENOENT);
	isw_store_destroy(store);
}

/* ------------------------------------------------------------------- the stub's faults */

/* Dozens of slabs: neither the answer to a consumer that comes back nor mapping looks one up. */
static void test_a_reclaim_looks_nothing_up(void)
{
	isw_store *store = store_make(SLABS);
	uint64_t lease = lease_make(store), generation[SLABS], looked_up, moved, probe = 0;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot[SLABS];

	for (uint32_t i = 0; i < SLABS; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	looked_up = stub.looked_up;
	moved = stub.moved;
	for (uint32_t epoch = 0; epoch < 3; epoch++) {
		consumer_make(&c);
		probe += ISW_PAGE_BYTES; /* the consumer's own page */
		consumer_connect(&c, store, lease);
		for (uint32_t i = 0; i < SLABS; i++) {
			if (epoch == 0)
				CHECK_EQ(isw_store_map(store, lease, i, &slot[i], &generation[i]),
					 0);
			CHECK_EQ(isw_store_rdma_key(store, lease, slot[i], generation[i], 1, &key,
						    NULL),
				 0);
			CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
		}
		CHECK_EQ(isw_store_lease_renew(store, lease, 1000, token), 0);
		consumer_free(&c);
	}
	CHECK_EQ(stub.looked_up - looked_up, probe + ISW_PAGE_BYTES); /* and the lease's probe */
	CHECK_EQ(stub.moved - moved, SLABS);
	isw_store_destroy(store);
}

/*
 * A device that cannot move a registration makes a new one; only the time is lost. The stub, told
 * so, or a real one that cannot.
 */
static void test_a_registration_that_cannot_be_moved(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation, looked_up;
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	STUB_SET(mr_move_error, -EOPNOTSUPP);
	/* Somebody who does not wait is told so, and nothing is registered in vain any more. */
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	looked_up = stub.looked_up;
	for (uint32_t i = 0; i < 2; i++) {
		CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL),
			 -EAGAIN);
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	}
	CHECK_EQ(stub.looked_up, looked_up);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &key, NULL), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 0), 0);
	CHECK_EQ(stats_of(store).rdma_regions + stats_of(store).rdma_ahead, 0);
	STUB_SET(mr_move_error, 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* Neither moved nor freed it may be half a key: the slab has none then. */
static void test_a_registration_that_is_half_moved(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	STUB_SET(mr_move_error, -EIO);
	STUB_SET(mr_free_error, -EIO);
	stub.mrs->peer = ISWI_VERBS_PEER_WRITES; /* only such ones are not freed then */
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &key, NULL), -EIO);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	STUB_SET(mr_move_error, 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	/* When it could be ended after all, the lease has RDMA again. */
	consumer_free(&c);
	consumer_make(&c);
	consumer_connect(&c, store, lease);
	map_slab(store, lease, &generation, &key);
	CHECK_EQ(transfer(&c, 0, false, key.address, key.rkey), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* A device is opened once for all, closed with its last user, and opened anew when it failed. */
static void test_a_device_that_failed_is_opened_anew(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), other = lease_make(store);
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key probe;
	struct consumer c;
	int live;

	consumer_make(&c);
	live = stub.live;
	consumer_connect(&c, store, lease);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(isw_store_rdma_open(store, other, c.ends, QUEUES, peers, &probe, NULL), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(isw_store_rdma_open(store, other, c.ends, QUEUES, peers, &probe, NULL), 0);
	CHECK_EQ(isw_store_rdma_close(store, other), 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK_EQ(stub.live, live);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* What is registered with it is registered anew, before somebody waits for that. */
static void test_what_a_failed_device_had_is_registered_anew(void)
{
	isw_store *store = store_make(2);
	uint64_t lease = lease_make(store), other = lease_make(store), generation;
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	consumer_make(&c);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(isw_store_rdma_open(store, other, c.ends, QUEUES, peers, &key, NULL), -EIO);
	STUB_SET(pd_make_error, 0);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), -EAGAIN);
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 1, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	/* Switched off: no device is held. */
	consumer_free(&c);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK(stub.live > 0);
	isw_store_rdma_ahead_end(store);
	CHECK_EQ(stats_of(store).rdma_ahead, 0);
	CHECK_EQ(stub.live, 0);
	isw_store_destroy(store);
}

/* A limit is for those who use RDMA first. */
static void test_what_nobody_uses_gives_way(void)
{
	isw_store *store = store_make(3);
	uint64_t lease = lease_make(store), tcp = lease_make(store), generation[2];
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot[2];

	consumer_make(&c);
	/* The consumer's page and two slabs; the lease's page and its slab come instead. */
	STUB_SET(mrs_max, 3);
	CHECK_EQ(isw_store_map(store, tcp, 0, &slot[0], &generation[0]), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot[1], &generation[1]), 0);
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOMEM);
	CHECK_EQ(isw_store_unmap(store, lease, slot[1], generation[1], 100), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot[1], &generation[1]), 0);
	consumer_connect(&c, store, lease);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot[1], generation[1], 0, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	CHECK_EQ(stats_of(store).rdma_ahead, 0);
	/* What is used stays, and the limit is one. */
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot[0], &generation[0]), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot[0], generation[0], 0, &key, NULL), -ENOMEM);
	STUB_SET(mrs_max, 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

static void test_what_could_be_registered_is_lent(void)
{
	isw_store *store = store_make(4);
	uint64_t lease = lease_make(store), generation;
	struct isw_error error = {0};
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	STUB_SET(mr_makes_left, 2);
	for (uint32_t i = 0; i < 2; i++)
		map_slab(store, lease, &generation, &key);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, generation, 0, &key, &error), -ENOMEM);
	CHECK(strstr(error.text, "ulimit -l"));
	CHECK_EQ(stats_of(store).rdma_failures, 1);
	CHECK_EQ(stats_of(store).rdma_regions, 2);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, 0, generation - 2, 0, &key, NULL), 0);
	CHECK_EQ(transfer(&c, 0, true, key.address, key.rkey), 0);
	/* Nor can a lease be opened then; the daemon goes on. */
	STUB_SET(mr_makes_left, 0);
	CHECK_EQ(isw_store_rdma_close(store, lease), 0);
	CHECK_EQ(isw_store_rdma_open(store, lease, c.ends, QUEUES, c.peers, &key, &error), -ENOMEM);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	STUB_SET(mr_makes_left, -1);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* A device that does not end a registration: the connections end instead, and the slab is safe. */
static void test_a_registration_that_stays(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	slot = map_slab(store, lease, &generation, &key);
	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), 0);
	CHECK_EQ(stats_of(store).rdma_connections, 0);
	CHECK(transfer(&c, 0, true, key.address, key.rkey) < 0);
	/* Its key is none for the slot's next slab. */
	for (uint32_t next = SLABS; next != slot;) {
		CHECK_EQ(isw_store_scrub(store), 0);
		CHECK_EQ(isw_store_map(store, lease, 0, &next, &generation), 0);
		CHECK_EQ(isw_store_rdma_key(store, lease, next, generation, 0, &key, NULL),
			 -ENOTCONN);
		CHECK_EQ(isw_store_unmap(store, lease, next, generation, 100), 0);
	}
	STUB_SET(mr_free_error, 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* Neither registration nor connections end: then the slab never becomes somebody else's. */
static void test_a_fence_that_fails_keeps_the_slab(void)
{
	isw_store *store = store_make(1);
	uint64_t lease = lease_make(store), generation;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_rdma_key key;
	struct consumer c;
	uint32_t slot;

	consumer_make(&c);
	consumer_connect(&c, store, lease);
	slot = map_slab(store, lease, &generation, &key);
	STUB_SET(mr_free_error, -EBUSY);
	STUB_SET(qp_free_error, -EBUSY);
	CHECK_EQ(isw_store_unmap(store, lease, slot, generation, 100), -EBUSY);
	CHECK_EQ(isw_store_lease_renew(store, lease, 100, token), -EBUSY);
	CHECK_EQ(stats_of(store).slabs_dirty, 0);
	CHECK_EQ(isw_store_scrub(store), -ENOENT);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(isw_store_lease_renew(store, lease, 100, token), 0);
	consumer_free(&c);
	isw_store_destroy(store);
}

/* Registers whatever is mapped, over and over. */
static void *register_all(void *arg)
{
	struct race *race = arg;
	struct isw_slot_info info;
	struct isw_rdma_key key;

	while (!atomic_load(&race->stop))
		for (uint32_t i = 0; isw_store_lease_slot(race->store, race->lease, i, &info) == 0;
		     i = info.slot + 1) {
			int code = isw_store_rdma_key(race->store, race->lease, info.slot,
						      info.generation, 0, &key, NULL);

			CHECK(code == 0 || code == -ESTALE || code == -ENOTCONN);
		}
	return NULL;
}

/* Opens and closes beside it. */
static void *open_and_close(void *arg)
{
	struct race *race = arg;
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key probe;

	while (!atomic_load(&race->stop)) {
		int code = isw_store_rdma_open(race->store, race->lease, race->consumer->ends,
					       QUEUES, peers, &probe, NULL);

		CHECK(code == 0 || code == -EBUSY);
		if (code == 0)
			CHECK_EQ(isw_store_rdma_close(race->store, race->lease), 0);
	}
	return NULL;
}

static void test_mapping_registering_and_renewing_at_once(void)
{
	struct race race = {.store = store_make(SLABS)};
	char token[ISW_TOKEN_TEXT_BYTES];
	pthread_t threads[3];
	struct consumer c;

	race.lease = lease_make(race.store);
	race.consumer = &c;
	consumer_make(&c);
	CHECK_EQ(pthread_create(&threads[0], NULL, register_all, &race), 0);
	CHECK_EQ(pthread_create(&threads[1], NULL, open_and_close, &race), 0);
	CHECK_EQ(pthread_create(&threads[2], NULL, register_ahead, &race), 0);
	for (uint32_t i = 0; i < 300; i++) {
		uint64_t generation;
		uint32_t slot;

		CHECK_EQ(isw_store_map(race.store, race.lease, 0, &slot, &generation), 0);
		if (i % 7 == 0)
			CHECK_EQ(isw_store_lease_renew(race.store, race.lease, 1000, token), 0);
		CHECK_EQ(isw_store_unmap(race.store, race.lease, slot, generation, 100), 0);
		/* Zeroed while nobody can reach it: a registration that is left would be a race. */
		CHECK_EQ(isw_store_scrub(race.store), 0);
	}
	atomic_store(&race.stop, true);
	for (uint32_t i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	CHECK_EQ(stats_of(race.store).rdma_regions, 0);
	consumer_free(&c);
	isw_store_destroy(race.store);
}

int main(void)
{
	bool moves;

	tests_begin();
	verbs = rig_on_stub() ? &stub_verbs : &iswi_verbs_system;
	host = rig_on_stub() ? "127.0.0.1" : getenv("ISW_TEST_RDMA_HOST");
	test_a_slab_is_reached_until_it_is_unmapped();
	test_out_of_bounds_and_the_probe_are_refused();
	test_a_neighbours_key_is_useless();
	test_a_renewal_ends_the_connections();
	test_a_slab_taken_by_force_ends_the_connections();
	test_without_rdma_connections_force_leaves_those_of_tcp();
	test_nonsense_is_refused();
	moves = moves_registrations();
	printf("registrations %s be moved\n", moves ? "can" : "cannot");
	if (moves)
		test_a_slab_is_registered_ahead();
	test_what_is_not_registered_is_not_waited_for(moves);
	test_mapping_registering_and_renewing_at_once();
	if (rig_on_stub() || !moves)
		test_a_registration_that_cannot_be_moved();
	if (rig_on_stub()) {
		test_a_reclaim_looks_nothing_up();
		test_a_registration_that_is_half_moved();
		test_a_device_that_failed_is_opened_anew();
		test_what_a_failed_device_had_is_registered_anew();
		test_what_nobody_uses_gives_way();
		test_what_could_be_registered_is_lent();
		test_a_registration_that_stays();
		test_a_fence_that_fails_keeps_the_slab();
	}
	tests_end();
	return 0;
}
