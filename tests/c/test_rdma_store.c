/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lease by RDMA: who reaches which slab, and until when. The consumer is bare verbs that does as
 * it pleases. On the stub, or, with ISW_TEST_RDMA_HOST, on this host's own devices.
 */
#include "rdma_consumer.h"

static void test_a_slab_is_reached_until_it_is_unmapped(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 2);
	struct mapped m;
	struct isw_rdma_key key, again;
	struct isw_lease_stats stats;

	m = map_slab(&s.f, s.lease);
	CHECK_EQ(key_of(&s, m, 0, &key), -ENOTCONN);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	consumer_connect(&s.c, store, s.lease);
	CHECK_EQ(isw_store_lease_stats(store, s.lease, &stats), 0);
	CHECK_EQ(stats.rdma_connections, QUEUES);
	m = map_key(&s, &key);
	CHECK_EQ(key_of(&s, m, 0, &again), 0);
	CHECK_EQ(again.rkey, key.rkey);
	CHECK_EQ(key_of(&s, (struct mapped){m.slot, m.generation + 1}, 0, &again), -ESTALE);
	CHECK_EQ(key_of(&s, (struct mapped){SLABS, m.generation}, 0, &again), -ESTALE);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 1);
	memset(s.c.page, 0x5a, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&s.c, 0, true, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	memset(s.c.page, 0, ISW_PAGE_BYTES);
	CHECK_EQ(transfer(&s.c, 1, false, key.address + 3 * ISW_PAGE_BYTES, key.rkey), 0);
	CHECK_EQ(s.c.page[ISW_PAGE_BYTES - 1], 0x5a);
	/* Whatever the consumer does: the key is dead, and the slab is zeroed for the next. */
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(reach(&s, 0, true, &key), -EACCES);
	/* A new key for the next use of the very memory. */
	for (uint32_t i = 0; i < 2; i++) {
		map_key(&s, &again);
		CHECK(again.rkey != key.rkey);
	}
	CHECK_EQ(stats_of(&s.f).read_requests + stats_of(&s.f).write_requests, 0);
	scene_end(&s);
}

static void test_out_of_bounds_and_the_probe_are_refused(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct isw_rdma_key key, probe;
	struct mapped m = map_key(&s, &key);

	for (uint32_t attack = 0; attack < 4; attack++) {
		const struct {
			bool write;
			struct isw_rdma_key key;
		} attacks[] = {
			{true, {key.address + SLAB_BYTES - 8, key.rkey}},
			{false, {key.address - 8, key.rkey}},
			{true, s.c.probe},
			{false, {key.address, key.rkey + 1}},
		};

		probe = s.c.probe;
		CHECK_EQ(reach(&s, 0, false, &probe), 0);
		CHECK_EQ(reach(&s, 0, attacks[attack].write, &attacks[attack].key), -EACCES);
		/* Only that connection has ended. */
		CHECK_EQ(reach(&s, 1, false, &key), 0);
		CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
		come_back(&s);
		CHECK_EQ(key_of(&s, m, 0, &key), 0);
	}
	scene_end(&s);
}

static void test_a_neighbours_key_is_useless(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 2);
	struct consumer neighbour;
	struct isw_rdma_key key;

	consumer_make(&neighbour);
	consumer_connect(&neighbour, store, lease_slots(&s.f, SLABS).lease);
	map_key(&s, &key);
	CHECK_EQ(transfer(&neighbour, 0, false, key.address, key.rkey), -EACCES);
	CHECK_EQ(transfer(&neighbour, 1, true, key.address, key.rkey), -EACCES);
	CHECK_EQ(reach(&s, 0, false, &key), 0);
	CHECK(all_bytes(s.c.page, 0, ISW_PAGE_BYTES));
	consumer_free(&neighbour);
	scene_end(&s);
}

/* The old epoch's connections are dead before the new one is granted; what they reached is not. */
static void test_a_renewal_ends_the_connections(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct isw_rdma_key key, fresh;
	struct mapped m = map_key(&s, &key);

	memset(s.c.page, 0x77, ISW_PAGE_BYTES);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	CHECK_EQ(isw_store_lease_renew(store, s.lease, 1000, s.token), 0);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK(reach(&s, 1, true, &key) < 0);
	CHECK_EQ(key_of(&s, m, 0, &fresh), -ENOTCONN);
	/* It is at hand for the new epoch: nobody waits for a registration. */
	come_back(&s);
	CHECK_EQ(key_of(&s, m, 1, &fresh), 0);
	CHECK_EQ(reach(&s, 0, false, &fresh), 0);
	CHECK_EQ(s.c.page[0], 0x77);
	CHECK_EQ(isw_store_lease_destroy(store, s.lease), 0);
	CHECK_EQ(isw_store_rdma_close(store, s.lease), -ENOENT);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 0);
	scene_end(&s);
}

/* What it has sent before must not meet the slot's next slab, whatever key that gets. */
static void test_a_slab_taken_by_force_ends_the_connections(void)
{
	struct scene s;
	struct mapped kept, taken;
	struct isw_rdma_key key, other;

	scene_connected(&s, 2);
	kept = map_key(&s, &other);
	taken = map_key(&s, &key);
	CHECK_EQ(reach(&s, 0, false, &other), 0);
	CHECK_EQ(unmap_slab(&s.f, s.lease, taken, 0), 0);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 1);
	CHECK(reach(&s, 0, true, &other) < 0);
	CHECK(reach(&s, 1, true, &key) < 0);
	CHECK_EQ(key_of(&s, kept, 0, &key), -ENOTCONN);
	come_back(&s);
	CHECK_EQ(key_of(&s, kept, 0, &other), 0);
	CHECK_EQ(reach(&s, 0, false, &other), 0);
	scene_end(&s);
}

/* The lease has its registrations, but pages go over TCP: that is the fence then. */
static void test_without_rdma_connections_force_leaves_those_of_tcp(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 3);
	int fd = open_export(s.f.port, s.token);
	char page[ISW_PAGE_BYTES];
	struct isw_rdma_key key;
	struct mapped m = map_key(&s, &key);

	CHECK_EQ(isw_store_rdma_pause(store, s.lease), 0);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 0), 0);
	m = map_slab(&s.f, s.lease);
	CHECK_EQ(do_read(fd, m.slot * SLAB_BYTES, page, sizeof(page)), 0);
	/* With connections they go, too; and so they do with all that is registered. */
	for (uint32_t whole = 0; whole < 2; whole++) {
		come_back(&s);
		if (whole)
			CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
		else
			CHECK_EQ(unmap_slab(&s.f, s.lease, m, 0), 0);
		hear_close(fd);
		close(fd);
		CHECK_EQ(isw_store_lease_renew(store, s.lease, 1000, s.token), 0);
		fd = open_export(s.f.port, s.token);
	}
	close(fd);
	scene_end(&s);
}

static void test_nonsense_is_refused(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 1);
	const struct {
		uint32_t ends;
		uint64_t lease;
		int code;
	} cases[] = {
		{0, s.lease, -EINVAL},
		{ISW_RDMA_QUEUES_MAX + 1, s.lease, -EINVAL},
		{1, s.lease + 1, -ENOENT},
		{2, s.lease, -EINVAL},
	};
	struct isw_rdma_key probe;

	s.c.ends[1].psn = 1u << 30;
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++)
		CHECK_EQ(isw_store_rdma_open(store, cases[i].lease, s.c.ends, cases[i].ends,
					     s.c.peers, &probe, NULL),
			 cases[i].code);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
	scene_end(&s);
}

/* Whether the device can move a registration. Soft-RoCE cannot before Linux 6.5. */
static bool moves_registrations(void)
{
	struct iswi_verbs_key key;
	struct iswi_vmr *mr;
	struct iswi_vpd *pd;
	struct consumer c;
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
	struct scene s;
	isw_store *store = scene_begin(&s, 3);
	struct isw_rdma_key key, again;
	struct mapped m;

	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 2);
	/* Who has no use for it gets the third. */
	map_slab(&s.f, lease_slots(&s.f, SLABS).lease);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0); /* it may want it later */
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 3);
	consumer_connect(&s.c, store, s.lease);
	m = map_slab(&s.f, s.lease);
	CHECK_EQ(key_of(&s, m, 1, &key), 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 2);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 1);
	memset(s.c.page, 0x3c, ISW_PAGE_BYTES);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	/* Taken back while the connections live, its key is dead, and it is registered again. */
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 2);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK(reach(&s, 0, true, &key) < 0);
	/* Another lease's by now: nothing of before is there, and nobody else's key opens it. */
	m = map_slab(&s.f, s.lease);
	CHECK_EQ(key_of(&s, m, 1, &again), 0);
	CHECK(again.rkey != key.rkey);
	CHECK_EQ(reach(&s, 1, false, &again), 0);
	CHECK_EQ(s.c.page[0], 0);
	CHECK_EQ(isw_store_lease_renew(store, s.lease, 1000, s.token), 0);
	CHECK_EQ(isw_store_lease_destroy(store, s.lease), 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 2);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 0);
	/* Given back to the host none is registered any more; the other lease's is. */
	while (isw_store_release_free(store) == 0)
		;
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 1);
	scene_end(&s);
}

static void test_what_is_not_registered_is_not_waited_for(bool moves)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 2);
	struct mapped m;
	struct isw_rdma_key key;

	m = map_slab(&s.f, s.lease);
	consumer_connect(&s.c, store, s.lease);
	CHECK_EQ(key_of(&s, m, 1, &key), -EAGAIN);
	CHECK_EQ(isw_store_rdma_pause(store, s.lease), 0);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK_EQ(key_of(&s, m, 1, &key), -ENOTCONN);
	while (isw_store_rdma_ahead(store, NULL) == 0)
		;
	come_back(&s);
	if (!moves)
		CHECK_EQ(key_of(&s, m, 1, &key), -EAGAIN);
	CHECK_EQ(key_of(&s, m, moves, &key), 0);
	CHECK_EQ(reach(&s, 0, false, &key), 0);
	CHECK_EQ(isw_store_rdma_pause(store, s.lease + 1), -ENOENT);
	scene_end(&s);
}

/* ------------------------------------------------------------------- the stub's faults */

/* Dozens of slabs: neither the answer to a consumer that comes back nor mapping looks one up. */
static void test_a_reclaim_looks_nothing_up(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, SLABS);
	uint64_t looked_up, moved, probe = ISW_PAGE_BYTES; /* of the lease */
	struct mapped m[SLABS];
	struct isw_rdma_key key;

	for (uint32_t i = 0; i < SLABS; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	looked_up = stub.looked_up;
	moved = stub.moved;
	for (uint32_t epoch = 0; epoch < 3; epoch++) {
		come_back(&s);
		probe += ISW_PAGE_BYTES; /* the consumer's own page */
		for (uint32_t i = 0; i < SLABS; i++) {
			if (epoch == 0)
				m[i] = map_slab(&s.f, s.lease);
			CHECK_EQ(key_of(&s, m[i], 1, &key), 0);
			CHECK_EQ(reach(&s, 0, true, &key), 0);
		}
		CHECK_EQ(isw_store_lease_renew(store, s.lease, 1000, s.token), 0);
	}
	CHECK_EQ(stub.looked_up - looked_up, probe);
	CHECK_EQ(stub.moved - moved, SLABS);
	scene_end(&s);
}

/*
 * A device that cannot move a registration makes a new one; only the time is lost. The stub, told
 * so, or a real one that cannot.
 */
static void test_a_registration_that_cannot_be_moved(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct isw_rdma_key key;
	struct mapped m;
	uint64_t looked_up;

	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	STUB_SET(mr_move_error, -EOPNOTSUPP);
	/* Somebody who does not wait is told so, and nothing is registered in vain any more. */
	m = map_slab(&s.f, s.lease);
	looked_up = stub.looked_up;
	for (uint32_t i = 0; i < 2; i++) {
		CHECK_EQ(key_of(&s, m, 1, &key), -EAGAIN);
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	}
	CHECK_EQ(stub.looked_up, looked_up);
	CHECK_EQ(key_of(&s, m, 0, &key), 0);
	CHECK_EQ(key_of(&s, m, 1, &key), 0);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 0), 0);
	CHECK_EQ(stats_of(&s.f).rdma_regions + stats_of(&s.f).rdma_ahead, 0);
	STUB_SET(mr_move_error, 0);
	scene_end(&s);
}

/* Neither moved nor freed it may be half a key: the slab has none then. */
static void test_a_registration_that_is_half_moved(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct mapped m;
	struct isw_rdma_key key;

	CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	m = map_slab(&s.f, s.lease);
	STUB_SET(mr_move_error, -EIO);
	STUB_SET(mr_free_error, -EIO);
	stub.mrs->peer = ISWI_VERBS_PEER_WRITES; /* only such ones are not freed then */
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(key_of(&s, m, 0, &key), -EIO);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	STUB_SET(mr_move_error, 0);
	STUB_SET(mr_free_error, 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	/* When it could be ended after all, the lease has RDMA again. */
	come_back(&s);
	map_key(&s, &key);
	CHECK_EQ(reach(&s, 0, false, &key), 0);
	scene_end(&s);
}

/* A device is opened once for all, closed with its last user, and opened anew when it failed. */
static void test_a_device_that_failed_is_opened_anew(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	uint64_t other = lease_slots(&s.f, SLABS).lease;

	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(&s, other), -EIO);
	STUB_SET(pd_make_error, 0);
	CHECK_EQ(open_again(&s, other), 0);
	CHECK_EQ(isw_store_rdma_close(store, other), 0);
	CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
	CHECK_EQ(stub.live, s.live);
	scene_end(&s);
}

/* What is registered with it is registered anew, before somebody waits for that. */
static void test_what_a_failed_device_had_is_registered_anew(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 2);
	uint64_t other = lease_slots(&s.f, SLABS).lease;
	struct mapped m;
	struct isw_rdma_key key;

	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOENT);
	STUB_SET(pd_make_error, -EIO);
	CHECK_EQ(open_again(&s, other), -EIO);
	STUB_SET(pd_make_error, 0);
	consumer_connect(&s.c, store, s.lease);
	m = map_slab(&s.f, s.lease);
	CHECK_EQ(key_of(&s, m, 1, &key), -EAGAIN);
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(key_of(&s, m, 1, &key), 0);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	/* Switched off: no device is held. */
	CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
	CHECK(stub.live > s.live);
	isw_store_rdma_ahead_end(store);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 0);
	CHECK_EQ(stub.live, s.live);
	scene_end(&s);
}

/* A limit is for those who use RDMA first. */
static void test_what_nobody_uses_gives_way(void)
{
	struct scene s;
	isw_store *store = scene_begin(&s, 3);
	struct isw_rdma_key key;
	struct mapped m;

	/* The consumer's page and two slabs; the lease's page and its slab come instead. */
	STUB_SET(mrs_max, 3);
	map_slab(&s.f, lease_slots(&s.f, SLABS).lease);
	m = map_slab(&s.f, s.lease);
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
	CHECK_EQ(isw_store_rdma_ahead(store, NULL), -ENOMEM);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	m = map_slab(&s.f, s.lease);
	consumer_connect(&s.c, store, s.lease);
	CHECK_EQ(key_of(&s, m, 0, &key), 0);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	CHECK_EQ(stats_of(&s.f).rdma_ahead, 0);
	/* What is used stays, and the limit is one. */
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(key_of(&s, map_slab(&s.f, s.lease), 0, &key), -ENOMEM);
	STUB_SET(mrs_max, 0);
	scene_end(&s);
}

static void test_what_could_be_registered_is_lent(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 4);
	struct mapped first, m;
	struct isw_error error = {0};
	struct isw_rdma_key key;

	STUB_SET(mr_makes_left, 2);
	first = map_key(&s, &key);
	map_key(&s, &key);
	m = map_slab(&s.f, s.lease);
	CHECK_EQ(isw_store_rdma_key(store, s.lease, m.slot, m.generation, 0, &key, &error),
		 -ENOMEM);
	CHECK(strstr(error.text, "ulimit -l"));
	CHECK_EQ(stats_of(&s.f).rdma_failures, 1);
	CHECK_EQ(stats_of(&s.f).rdma_regions, 2);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(key_of(&s, first, 0, &key), 0);
	CHECK_EQ(reach(&s, 0, true, &key), 0);
	/* Nor can a lease be opened then; the daemon goes on. */
	STUB_SET(mr_makes_left, 0);
	CHECK_EQ(isw_store_rdma_close(store, s.lease), 0);
	CHECK_EQ(isw_store_rdma_open(store, s.lease, s.c.ends, QUEUES, s.c.peers, &key, &error),
		 -ENOMEM);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	STUB_SET(mr_makes_left, -1);
	scene_end(&s);
}

/* A device that does not end a registration: the connections end instead, and the slab is safe. */
static void test_a_registration_that_stays(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct mapped m;
	struct isw_rdma_key key;

	m = map_key(&s, &key);
	STUB_SET(mr_free_error, -EBUSY);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
	CHECK_EQ(stats_of(&s.f).rdma_connections, 0);
	CHECK(reach(&s, 0, true, &key) < 0);
	/* Its key is none for the slot's next slab. */
	for (struct mapped next = {.slot = SLABS}; next.slot != m.slot;) {
		CHECK_EQ(isw_store_scrub(store), 0);
		next = map_slab(&s.f, s.lease);
		CHECK_EQ(key_of(&s, next, 0, &key), -ENOTCONN);
		CHECK_EQ(unmap_slab(&s.f, s.lease, next, 100), 0);
	}
	STUB_SET(mr_free_error, 0);
	scene_end(&s);
}

/* Neither registration nor connections end: then the slab never becomes somebody else's. */
static void test_a_fence_that_fails_keeps_the_slab(void)
{
	struct scene s;
	isw_store *store = scene_connected(&s, 1);
	struct mapped m;
	struct isw_rdma_key key;

	m = map_key(&s, &key);
	STUB_SET(mr_free_error, -EBUSY);
	STUB_SET(qp_free_error, -EBUSY);
	CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), -EBUSY);
	CHECK_EQ(isw_store_lease_renew(store, s.lease, 100, s.token), -EBUSY);
	CHECK_EQ(stats_of(&s.f).slabs_dirty, 0);
	CHECK_EQ(isw_store_scrub(store), -ENOENT);
	STUB_SET(mr_free_error, 0);
	STUB_SET(qp_free_error, 0);
	CHECK_EQ(isw_store_lease_renew(store, s.lease, 100, s.token), 0);
	scene_end(&s);
}

/* Registers whatever is mapped, over and over. */
static void *register_all(void *arg)
{
	struct scene *s = arg;
	struct isw_slot_info info;
	struct isw_rdma_key key;

	while (!atomic_load(&s->stop))
		for (uint32_t i = 0; isw_store_lease_slot(s->f.store, s->lease, i, &info) == 0;
		     i = info.slot + 1) {
			int code = key_of(s, (struct mapped){info.slot, info.generation}, 0, &key);

			CHECK(code == 0 || code == -ESTALE || code == -ENOTCONN);
		}
	return NULL;
}

/* Opens and closes beside it. */
static void *open_and_close(void *arg)
{
	struct scene *s = arg;

	while (!atomic_load(&s->stop)) {
		int code = open_again(s, s->lease);

		CHECK(code == 0 || code == -EBUSY);
		if (code == 0)
			CHECK_EQ(isw_store_rdma_close(s->f.store, s->lease), 0);
	}
	return NULL;
}

static void test_mapping_registering_and_renewing_at_once(void)
{
	void *(*const beside[])(void *) = {register_all, open_and_close, register_ahead};
	pthread_t threads[ISWI_ARRAY_LEN(beside)];
	struct scene s;
	isw_store *store = scene_begin(&s, SLABS);

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(beside); i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, beside[i], &s), 0);
	for (uint32_t i = 0; i < 300; i++) {
		struct mapped m = map_slab(&s.f, s.lease);

		if (i % 7 == 0)
			CHECK_EQ(isw_store_lease_renew(store, s.lease, 1000, s.token), 0);
		CHECK_EQ(unmap_slab(&s.f, s.lease, m, 100), 0);
		/* Zeroed while nobody can reach it: a registration that is left would be a race. */
		CHECK_EQ(isw_store_scrub(store), 0);
	}
	race_end(&s, threads, ISWI_ARRAY_LEN(beside));
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
