// SPDX-License-Identifier: Apache-2.0
/*
 * The fence: who still holds a slab when it is taken away, and that nobody else's bytes are ever
 * seen, or written, because of it. All of it three times: each connection has a thread of its own,
 * or two have, or workers serve them all.
 */
#define OWN_MAIN
#include <stdatomic.h>

#include "store/store.h"
#include "store_fixture.h"
#include "util/util.h"
#include "wire/nbd_conn.h"

#define SMALL_BYTES 65536u
#define LARGE_BYTES (8u << 20) /* more than loopback takes in for a client that does not read */

static uint32_t lone_threads_max = 8; /* as in the product */

/* A store with one lease, and a slab there that a thread may take away. */
static struct leased leased;
static struct mapped mapped;
static pthread_t thread;

static void begin(uint32_t bytes, uint32_t slabs, uint32_t slots)
{
	set_up(bytes, slabs);
	store->server->config.lone_threads_max = lone_threads_max;
	leased = lease_slots(slots);
	mapped = map_slab(leased.lease);
}

#define SMALL_TEST(name, slabs, slots)                                                             \
	BETWEEN_TEST(name, begin(SMALL_BYTES, slabs, slots), tear_down())
#define LARGE_TEST(name) BETWEEN_TEST(name, begin(LARGE_BYTES, 1, 1), tear_down())

static int unmap(uint32_t wait_ms_max)
{
	return unmap_slab(leased.lease, mapped, wait_ms_max);
}

static int connected(void)
{
	return open_export(port, leased.ticket);
}

static void *unmap_main(void *opaque)
{
	(void)opaque;
	return (void *)(intptr_t)unmap(WAIT_S * 1000);
}

static void unmap_start(void)
{
	CHECK_EQ(iswi_thread_start(&thread, "unmap", unmap_main, NULL), 0);
}

static int unmap_join(void)
{
	void *result;

	pthread_join(thread, &result);
	return (int)(intptr_t)result;
}

/* How many requests hold the slot. From inside, for the bytes of a write under way are its own. */
static unsigned holders(void)
{
	struct iswi_lease *found;
	unsigned refs = 0;

	pthread_mutex_lock(&store->lock);
	found = iswi_lease_find(store, leased.lease);
	if (found != NULL)
		refs = (unsigned)atomic_load(&found->slots[mapped.slot].refs);
	pthread_mutex_unlock(&store->lock);
	return refs;
}

/* Half of a page's WRITE: from here on it holds the slot, until the other half is said. */
static void say_first_half(int fd, int value)
{
	char half[2048];

	memset(half, value, sizeof(half));
	CHECK(say_request(fd, NBD_CMD_WRITE, 0, 8, 0, 2 * sizeof(half)));
	CHECK(say(fd, half, sizeof(half)));
	WAIT_FOR(holders() == 1);
}

/* Asks for all of the slab and takes no more of the answer than its header. */
static int deaf_reader(void)
{
	char header[NBD_SIMPLE_REPLY_BYTES];
	int fd = dial_buffered(port, 4096);

	CHECK_EQ(try_open(fd, leased.ticket), 0);
	CHECK(say_request(fd, NBD_CMD_READ, 0, 1, 0, LARGE_BYTES));
	CHECK(hear(fd, header, sizeof(header)));
	return fd;
}

/*
 * A READ whose answer is half sent holds its slab: unmap waits, the slab is not even dirty, and
 * when the client reads on, every byte is the right one.
 */
LARGE_TEST(test_half_sent_answer_holds_the_slab)
{
	static char data[LARGE_BYTES];
	int reader, other = connected();

	fill_bytes(other, 0, 0x77, LARGE_BYTES);
	reader = deaf_reader();
	unmap_start();
	WAIT_FOR(do_read(other, 0, data, 512) == NBD_EIO); /* the fence is up */
	sleep_ms(50);
	CHECK_EQ(store_stats().slabs_mapped, 1);
	CHECK_EQ(isw_store_scrub(store), -ENOENT);
	CHECK(hear(reader, data, LARGE_BYTES));
	CHECK(all_bytes(data, 0x77, LARGE_BYTES));
	CHECK_EQ(unmap_join(), 0);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	/* Nothing was forced: both connections live. */
	CHECK_EQ(do_read(reader, 0, data, 512), NBD_EIO);
	CHECK_EQ(do_read(other, 0, data, 512), NBD_EIO);
	close(reader);
	close(other);
}

/* The same, but the client never reads on: past its time unmap ends the connections. */
LARGE_TEST(test_forced_unmap_of_a_deaf_reader)
{
	static char data[LARGE_BYTES];
	int reader = deaf_reader();

	CHECK_EQ(unmap(50), 0);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	WAIT_FOR(lease_stats(leased.lease).connections == 0);
	CHECK(!hear(reader, data, LARGE_BYTES)); /* cut off, never filled up with something else */
	close(reader);
}

/*
 * Half a payload, then silence: it holds its slot until unmap forces it out. What the client
 * sends after that lands nowhere, least of all in the slab's next use.
 */
SMALL_TEST(test_slow_write_ends_with_forced_unmap, 1, 1)
{
	struct leased next;
	char half[2048];
	int slow = connected(), fd;

	say_first_half(slow, 0x66);
	CHECK_EQ(unmap(50), 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	next = lease_slots(1);
	map_slab(next.lease);
	memset(half, 0x66, sizeof(half));
	say(slow, half, sizeof(half));
	await_close(slow);
	fd = open_export(port, next.ticket);
	check_bytes(fd, 0, 0, 4096);
	close(fd);
}

/*
 * A slab that was taken by force, without its owner's DONE: a write that was sent before that and
 * arrives later finds no other slab under the same offset, however many are mapped meanwhile.
 */
SMALL_TEST(test_slot_taken_by_force_waits_for_old_connections, 3, 2)
{
	struct mapped other, again;
	char page[512];
	int old = connected(), second;

	CHECK_EQ(unmap(0), 0);
	other = map_slab(leased.lease);
	CHECK(other.slot != mapped.slot);
	/* With DONE a slot is free at once, and taken again: the forced one is not. */
	CHECK_EQ(unmap_slab(leased.lease, other, 1), 0);
	again = map_slab(leased.lease);
	CHECK_EQ(again.slot, other.slot);
	memset(page, 0x44, sizeof(page));
	CHECK_EQ(do_write(old, mapped.slot * SMALL_BYTES, page, sizeof(page)), NBD_EIO);
	/* One that came after that has nothing to do with it. */
	second = connected();
	scrub_all();
	/* Nothing else is left: the old connections are sent away for it, all of them. */
	CHECK_EQ(isw_store_map(store, leased.lease, 0, &again.slot, &again.generation), -EAGAIN);
	await_close(old);
	await_close(second);
	WAIT_FOR(isw_store_map(store, leased.lease, 0, &again.slot, &again.generation) == 0);
	CHECK_EQ(again.slot, mapped.slot);
}

/*
 * A write under way is waited for, and it is whole when unmap returns; or its lease is destroyed
 * meanwhile, and both end.
 */
TEST_CASES(test_write_under_way_is_waited_for, 2, destroyed)
{
	char half[2048], byte;
	int writer, other;

	begin(SMALL_BYTES, 1, 1);
	writer = connected();
	other = connected();
	say_first_half(writer, 0x55);
	unmap_start();
	WAIT_FOR(do_read(other, 8192, &byte, 1) == NBD_EIO);
	CHECK_EQ(store_stats().slabs_dirty, 0);
	if (destroyed) {
		CHECK_EQ(isw_store_lease_destroy(store, leased.lease), 0);
	} else {
		/* A second unmap of the same slot is told so, and waits for nothing. */
		CHECK_EQ(unmap(0), -EALREADY);
		memset(half, 0x55, sizeof(half));
		CHECK(say(writer, half, sizeof(half)));
		CHECK_EQ(hear_reply(writer, 8, NULL, 0), 0);
	}
	CHECK_EQ(unmap_join(), 0);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	close(writer);
	close(other);
	tear_down();
}

struct old_writer {
	int fd;
	atomic_uint written; /* relaxed: shows that the hammering has begun */
};

/* Writes 0x11 over the same pages, again and again, many requests ahead of the answers. */
static void *old_writer_main(void *opaque)
{
	struct old_writer *w = opaque;
	char page[4096], answer[NBD_SIMPLE_REPLY_BYTES];

	memset(page, 0x11, sizeof(page));
	for (unsigned i = 0; i < 1000000; i++) {
		uint32_t ahead = 16;

		if (!say_request(w->fd, NBD_CMD_WRITE, 0, i, 4096 * (i % 8), sizeof(page)) ||
		    !say(w->fd, page, sizeof(page)))
			break;
		if (i >= ahead && !hear(w->fd, answer, sizeof(answer)))
			break;
		atomic_store(&w->written, i);
	}
	return NULL;
}

/*
 * Writes sent on a connection of the old epoch, however many are under way, do not land after
 * renew has returned: what the new epoch writes stays.
 */
SMALL_TEST(test_no_late_write_after_renew, 1, 1)
{
	char page[4096] = {0};

	for (unsigned round = 0; round < 20; round++) {
		struct old_writer old = {.fd = connected()};
		int slow = connected(), fd;
		pthread_t thread;

		CHECK(say_request(slow, NBD_CMD_WRITE, 0, 1, 4096 * 8, 4096));
		CHECK(say(slow, "half", 4));
		CHECK_EQ(iswi_thread_start(&thread, "old", old_writer_main, &old), 0);
		WAIT_FOR(atomic_load(&old.written) > 100);
		CHECK_EQ(lease_renew(store, leased.lease, WAIT_S * 1000, leased.ticket), 0);
		fd = connected();
		for (unsigned i = 0; i < 9; i++)
			fill_bytes(fd, 4096 * i, 0x22, 4096);
		say(slow, page, 4092);
		for (unsigned i = 0; i < 45; i++)
			check_bytes(fd, 4096 * (i % 9), 0x22, 4096);
		pthread_join(thread, NULL);
		close(old.fd);
		close(slow);
		close(fd);
	}
	give_back(leased.lease);
}

/*
 * A connection busy zeroing a large slab cannot end at once. A renewal that does not wait for it
 * grants nothing: from then on the old ticket is dead and there is no new one, until a renewal
 * that has seen it end.
 */
BETWEEN_TEST(test_renewal_that_cannot_wait, begin(64u << 20, 1, 1), tear_down())
{
	const uint32_t bytes = 64u << 20;
	char ticket[ISW_TICKET_TEXT_BYTES];
	int err = 0, late;

	wait_as_told();
	for (unsigned attempt = 0; attempt < ENDS_IN_TIME_MAX && err == 0; attempt++) {
		int busy = connected();

		for (unsigned i = 0; i < 32; i++)
			CHECK(say_request(busy, NBD_CMD_WRITE_ZEROES, 0, i, 0, bytes));
		WAIT_FOR(holders() == 1);
		strcpy(ticket, leased.ticket);
		err = lease_renew(store, leased.lease, 0, leased.ticket);
		close(busy);
	}
	CHECK_EQ(err, -ETIMEDOUT);
	CHECK(strcmp(ticket, leased.ticket) == 0);
	late = dial(port);
	CHECK_EQ(try_open(late, ticket), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(lease_renew(store, leased.lease, WAIT_S * 1000, ticket), 0);
	CHECK_EQ(ask_export(late, NBD_OPT_GO, leased.ticket, NULL), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(ask_export(late, NBD_OPT_GO, ticket, NULL), NBD_REP_ACK);
	close(late);
}

/* ---- the fence alone, as fast as it goes: the windows are a few instructions wide */

#define DIRECT_ROUNDS 20000u
#define TAKEN_AWAY    0xdeadu

static atomic_bool fence_ending;

struct holder {
	struct iswi_nbd_export export;
	atomic_uint held, refused; /* relaxed: shows that both were tried */
	pthread_t thread;
};

static void *holder_main(void *opaque)
{
	struct holder *h = opaque;

	while (!atomic_load(&fence_ending)) {
		struct iswi_nbd_hold hold;

		if (iswi_store_backend.hold(&h->export, 0, ISW_PAGE_BYTES, &hold) != 0) {
			atomic_fetch_add(&h->refused, 1);
			continue;
		}
		CHECK(atomic_load((atomic_uint *)hold.memory) != TAKEN_AWAY);
		iswi_store_backend.release(&h->export, &hold);
		atomic_fetch_add(&h->held, 1);
	}
	return NULL;
}

/* No connection, no socket: what a request holds is not taken away under it. */
TEST(test_fence_alone)
{
	struct holder holders[2] = {0};
	struct leased leased;
	char nobody; /* stands for a connection. Were one shut without need, it would show */

	atomic_store(&fence_ending, false);
	set_up(ISW_PAGE_BYTES, 1);
	leased = lease_slots(1);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++) {
		CHECK_EQ(iswi_store_backend.open(store, leased.ticket, ISWI_TICKET_BYTES,
						 (struct iswi_nbd_conn *)&nobody,
						 &holders[i].export),
			 0);
		CHECK_EQ(iswi_thread_start(&holders[i].thread, "holder", holder_main, &holders[i]),
			 0);
	}
	for (unsigned i = 0; i < DIRECT_ROUNDS; i++) {
		struct mapped mapped = map_slab(leased.lease);

		CHECK_EQ(unmap_slab(leased.lease, mapped, WAIT_S * 1000), 0);
		atomic_store((atomic_uint *)store->slabs[0].mem.base, TAKEN_AWAY);
		CHECK_EQ(isw_store_scrub(store), 0);
	}
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++)
		WAIT_FOR(atomic_load(&holders[i].refused) > 0);
	map_slab(leased.lease);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++)
		WAIT_FOR(atomic_load(&holders[i].held) > 0);
	atomic_store(&fence_ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++) {
		pthread_join(holders[i].thread, NULL);
		iswi_store_backend.close(store, &holders[i].export,
					 (struct iswi_nbd_conn *)&nobody);
	}
	tear_down();
}

/* ---- everything at once */

#define HAMMER_SLABS  3u
#define HAMMER_SLOTS  2u
#define HAMMER_ROUNDS 150u
#define TENANTS       4u

static struct {
	pthread_mutex_t lock;
	struct leased leased[2];
	struct mapped mapped[2][HAMMER_SLOTS]; /* generation 0: not mapped */
	atomic_bool ending;
} landlord;

static atomic_ullong reads, refusals; /* show that both were tried */

struct tenant {
	unsigned char tag;
	uint64_t page; /* of each slot this client keeps to: two do not share bytes */
	const struct leased *leased;
	pthread_t thread;
};

/* Writes its own tag, reads: nothing but that tag or zeros may come, or an error. */
static bool tenant_step(struct tenant *t, int fd, unsigned i)
{
	const uint64_t offset = (i % HAMMER_SLOTS) * (uint64_t)SMALL_BYTES + t->page * 4096;
	unsigned char page[4096];
	uint32_t error = do_read(fd, offset, page, sizeof(page));

	if (error == CLOSED)
		return false;
	if (error == 0) {
		CHECK(page[0] == 0 || page[0] == t->tag);
		CHECK(all_bytes(page, page[0], sizeof(page)));
		reads++;
	} else {
		CHECK_EQ(error, NBD_EIO);
		refusals++;
	}
	memset(page, t->tag, sizeof(page));
	error = do_write(fd, offset, page, sizeof(page));
	CHECK(error == 0 || error == NBD_EIO || error == CLOSED);
	return error != CLOSED;
}

static void *tenant_main(void *opaque)
{
	struct tenant *t = opaque;
	unsigned i = 0;

	while (!atomic_load(&landlord.ending)) {
		char ticket[ISW_TICKET_TEXT_BYTES];
		int fd = dial(port);

		pthread_mutex_lock(&landlord.lock);
		strcpy(ticket, t->leased->ticket);
		pthread_mutex_unlock(&landlord.lock);
		if (try_open(fd, ticket) == 0)
			while (!atomic_load(&landlord.ending) && tenant_step(t, fd, i))
				i++;
		close(fd);
	}
	return NULL;
}

static uint32_t random_next(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 16;
}

/* Takes a slab from one lease or gives one; now and then a fresh ticket, or a fresh lease. */
static void landlord_step(uint32_t *random)
{
	const unsigned who = random_next(random) % 2, what = random_next(random) % 16;
	struct leased *leased = &landlord.leased[who];
	struct mapped *mapped = &landlord.mapped[who][random_next(random) % HAMMER_SLOTS];
	char ticket[ISW_TICKET_TEXT_BYTES];
	int err;

	if (what == 0) {
		CHECK_EQ(lease_renew(store, leased->lease, WAIT_S * 1000, ticket), 0);
		pthread_mutex_lock(&landlord.lock);
		strcpy(leased->ticket, ticket);
		pthread_mutex_unlock(&landlord.lock);
	} else if (what == 1) {
		CHECK_EQ(isw_store_lease_destroy(store, leased->lease), 0);
		pthread_mutex_lock(&landlord.lock);
		*leased = lease_slots(HAMMER_SLOTS);
		pthread_mutex_unlock(&landlord.lock);
		memset(landlord.mapped[who], 0, sizeof(landlord.mapped[who]));
	} else if (mapped->generation != 0) {
		CHECK_EQ(unmap_slab(leased->lease, *mapped, what % 2 ? 0 : WAIT_S * 1000), 0);
		mapped->generation = 0;
	} else {
		err = isw_store_map(store, leased->lease, 0, &mapped->slot, &mapped->generation);
		CHECK(err == 0 || err == -ENOENT || err == -EAGAIN);
		if (err != 0)
			mapped->generation = 0;
	}
	scrub_all();
}

TEST(test_tenants_never_meet)
{
	static struct tenant tenants[TENANTS];
	uint32_t random = 12345;

	set_up(SMALL_BYTES, HAMMER_SLABS);
	store->server->config.lone_threads_max = lone_threads_max;
	memset(&landlord, 0, sizeof(landlord));
	reads = refusals = 0;
	pthread_mutex_init(&landlord.lock, NULL);
	atomic_init(&landlord.ending, false);
	for (unsigned i = 0; i < 2; i++)
		landlord.leased[i] = lease_slots(HAMMER_SLOTS);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(tenants); i++) {
		tenants[i] = (struct tenant){
			.tag = (unsigned char)(0xa1 + i % 2),
			.page = i / 2,
			.leased = &landlord.leased[i % 2],
		};
		CHECK_EQ(iswi_thread_start(&tenants[i].thread, "tenant", tenant_main, &tenants[i]),
			 0);
	}
	/* On a machine that others use it takes them longer to get anything done. */
	for (unsigned round = 0; round < HAMMER_ROUNDS || reads == 0 || refusals == 0; round++) {
		landlord_step(&random);
		if (round % 4 == 0)
			sleep_ms(2); /* let the tenants use what they have */
	}
	atomic_store(&landlord.ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(tenants); i++)
		pthread_join(tenants[i].thread, NULL);
	tear_down();
	pthread_mutex_destroy(&landlord.lock);
}

int main(void)
{
	run_tests();
	lone_threads_max = 2;
	run_tests();
	lone_threads_max = 0;
	return run_tests();
}
