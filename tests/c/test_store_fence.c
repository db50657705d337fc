// SPDX-License-Identifier: Apache-2.0
/*
 * The fence: who still holds a slab when it is taken away, and that nobody else's bytes are ever
 * seen, or written, because of it.
 */
#include <stdatomic.h>

#include "store/store.h"
#include "store_fixture.h"
#include "util/util.h"

#define SMALL_BYTES 65536u
#define LARGE_BYTES (8u << 20) /* more than loopback takes in for a client that does not read */

struct unmapping {
	const struct fixture *f;
	uint64_t lease;
	struct mapped mapped;
	uint32_t wait_ms_max;
	pthread_t thread;
	int result;
};

static void *unmap_main(void *opaque)
{
	struct unmapping *u = opaque;

	u->result = unmap_slab(u->f, u->lease, u->mapped, u->wait_ms_max);
	return NULL;
}

static void unmap_start(struct unmapping *u)
{
	CHECK_EQ(iswi_thread_start(&u->thread, "unmap", unmap_main, u), 0);
}

static int unmap_join(struct unmapping *u)
{
	pthread_join(u->thread, NULL);
	return u->result;
}

/* How many requests hold the slot. From inside, for the bytes of a write under way are its own. */
static unsigned holders(const struct fixture *f, uint64_t lease, struct mapped mapped)
{
	struct iswi_lease *found;
	unsigned refs = 0;

	pthread_mutex_lock(&f->store->lock);
	found = iswi_lease_find(f->store, lease);
	if (found != NULL)
		refs = (unsigned)atomic_load(&found->slots[mapped.slot].refs);
	pthread_mutex_unlock(&f->store->lock);
	return refs;
}

static void fill(int fd, uint64_t offset, int value, uint32_t bytes)
{
	char *data = malloc(bytes);

	CHECK(data != NULL);
	memset(data, value, bytes);
	CHECK_EQ(do_write(fd, offset, data, bytes), 0);
	free(data);
}

static void give_back(struct fixture *f, uint64_t lease)
{
	CHECK_EQ(isw_store_lease_destroy(f->store, lease), 0);
	while (isw_store_scrub(f->store) == 0)
		;
}

/*
 * A READ whose answer is half sent holds its slab: unmap waits, the slab is not even dirty, and
 * when the client reads on, every byte is the right one.
 */
static void test_half_sent_answer_holds_the_slab(void)
{
	struct fixture f;
	struct leased leased;
	struct unmapping u;
	static char data[LARGE_BYTES];
	int reader, other;

	set_up(&f, LARGE_BYTES, 1);
	leased = lease_slots(&f, 1);
	u = (struct unmapping){.f = &f,
			       .lease = leased.lease,
			       .mapped = map_slab(&f, leased.lease),
			       .wait_ms_max = WAIT_S * 1000};
	other = open_export(f.port, leased.token);
	fill(other, 0, 0x77, LARGE_BYTES);
	reader = dial_buffered(f.port, 4096);
	CHECK_EQ(try_open(reader, leased.token), 0);
	CHECK(say_request(reader, NBD_CMD_READ, 0, 1, 0, LARGE_BYTES));
	CHECK(hear(reader, data, NBD_SIMPLE_REPLY_BYTES)); /* it has begun */
	unmap_start(&u);
	WAIT_FOR(do_read(other, 0, data, 512) == NBD_EIO); /* the fence is up */
	sleep_ms(50);
	CHECK_EQ(stats_of(&f).slabs_mapped, 1);
	CHECK_EQ(isw_store_scrub(f.store), -ENOENT);
	CHECK(hear(reader, data, LARGE_BYTES));
	CHECK(all_bytes(data, 0x77, LARGE_BYTES));
	CHECK_EQ(unmap_join(&u), 0);
	CHECK_EQ(stats_of(&f).slabs_dirty, 1);
	/* Nothing was forced: both connections live. */
	CHECK_EQ(do_read(reader, 0, data, 512), NBD_EIO);
	CHECK_EQ(do_read(other, 0, data, 512), NBD_EIO);
	close(reader);
	close(other);
	tear_down(&f);
}

/* The same, but the client never reads on: past its time unmap ends the connections. */
static void test_forced_unmap_of_a_deaf_reader(void)
{
	struct fixture f;
	struct leased leased;
	struct mapped mapped;
	static char data[LARGE_BYTES];
	int reader;

	set_up(&f, LARGE_BYTES, 1);
	leased = lease_slots(&f, 1);
	mapped = map_slab(&f, leased.lease);
	reader = dial_buffered(f.port, 4096);
	CHECK_EQ(try_open(reader, leased.token), 0);
	CHECK(say_request(reader, NBD_CMD_READ, 0, 1, 0, LARGE_BYTES));
	CHECK(hear(reader, data, NBD_SIMPLE_REPLY_BYTES));
	CHECK_EQ(unmap_slab(&f, leased.lease, mapped, 50), 0);
	CHECK_EQ(stats_of(&f).slabs_dirty, 1);
	WAIT_FOR(lease_stats_of(&f, leased.lease).connections == 0);
	CHECK(!hear(reader, data, LARGE_BYTES)); /* cut off, never filled up with something else */
	close(reader);
	tear_down(&f);
}

/*
 * Half a payload, then silence: it holds its slot until unmap forces it out. What the client
 * sends after that lands nowhere, least of all in the slab's next use.
 */
static void test_slow_write_ends_with_forced_unmap(void)
{
	struct fixture f;
	struct leased leased, next;
	struct mapped mapped;
	char half[2048], page[4096];
	int slow, fd;

	set_up(&f, SMALL_BYTES, 1);
	leased = lease_slots(&f, 1);
	mapped = map_slab(&f, leased.lease);
	slow = open_export(f.port, leased.token);
	memset(half, 0x66, sizeof(half));
	CHECK(say_request(slow, NBD_CMD_WRITE, 0, 1, 0, 4096));
	CHECK(say(slow, half, sizeof(half)));
	/* Not before it holds the slot, or there would be nothing to force. */
	WAIT_FOR(holders(&f, leased.lease, mapped) == 1);
	CHECK_EQ(unmap_slab(&f, leased.lease, mapped, 50), 0);
	CHECK_EQ(isw_store_scrub(f.store), 0);
	next = lease_slots(&f, 1);
	map_slab(&f, next.lease);
	say(slow, half, sizeof(half));
	hear_close(slow);
	close(slow);
	fd = open_export(f.port, next.token);
	CHECK_EQ(do_read(fd, 0, page, sizeof(page)), 0);
	CHECK(all_bytes(page, 0, sizeof(page)));
	close(fd);
	tear_down(&f);
}

/*
 * A slab that was taken by force, without its owner's DONE: a write that was sent before that and
 * arrives later finds no other slab under the same offset, however many are mapped meanwhile.
 */
static void test_slot_taken_by_force_waits_for_old_connections(void)
{
	struct fixture f;
	struct leased leased;
	struct mapped forced, other, again;
	char page[512];
	int old, second;

	set_up(&f, SMALL_BYTES, 3);
	leased = lease_slots(&f, 2);
	forced = map_slab(&f, leased.lease);
	old = open_export(f.port, leased.token);
	CHECK_EQ(unmap_slab(&f, leased.lease, forced, 0), 0);
	other = map_slab(&f, leased.lease);
	CHECK(other.slot != forced.slot);
	/* With DONE a slot is free at once, and taken again: the forced one is not. */
	CHECK_EQ(unmap_slab(&f, leased.lease, other, 1), 0);
	again = map_slab(&f, leased.lease);
	CHECK_EQ(again.slot, other.slot);
	memset(page, 0x44, sizeof(page));
	CHECK_EQ(do_write(old, forced.slot * SMALL_BYTES, page, sizeof(page)), NBD_EIO);
	/* One that came after that has nothing to do with it. */
	second = open_export(f.port, leased.token);
	CHECK_EQ(isw_store_scrub(f.store), 0);
	CHECK_EQ(isw_store_scrub(f.store), 0);
	/* Nothing else is left: the old connections are sent away for it, all of them. */
	CHECK_EQ(isw_store_map(f.store, leased.lease, 0, &again.slot, &again.generation), -EAGAIN);
	hear_close(old);
	close(old);
	hear_close(second);
	close(second);
	WAIT_FOR(isw_store_map(f.store, leased.lease, 0, &again.slot, &again.generation) == 0);
	CHECK_EQ(again.slot, forced.slot);
	tear_down(&f);
}

/* A write under way is waited for, and it is whole when unmap returns. */
static void test_write_under_way_is_waited_for(void)
{
	struct fixture f;
	struct leased leased;
	struct unmapping u;
	char half[2048], byte;
	int writer, other;

	set_up(&f, SMALL_BYTES, 1);
	leased = lease_slots(&f, 1);
	u = (struct unmapping){.f = &f,
			       .lease = leased.lease,
			       .mapped = map_slab(&f, leased.lease),
			       .wait_ms_max = WAIT_S * 1000};
	writer = open_export(f.port, leased.token);
	other = open_export(f.port, leased.token);
	memset(half, 0x55, sizeof(half));
	CHECK(say_request(writer, NBD_CMD_WRITE, 0, 8, 0, 4096));
	CHECK(say(writer, half, sizeof(half)));
	WAIT_FOR(holders(&f, leased.lease, u.mapped) == 1);
	unmap_start(&u);
	WAIT_FOR(do_read(other, 8192, &byte, 1) == NBD_EIO);
	CHECK_EQ(stats_of(&f).slabs_dirty, 0);
	/* A second unmap of the same slot is told so, and waits for nothing. */
	CHECK_EQ(unmap_slab(&f, leased.lease, u.mapped, 0), -EALREADY);
	CHECK(say(writer, half, sizeof(half)));
	CHECK_EQ(hear_reply(writer, 8, NULL, 0), 0);
	CHECK_EQ(unmap_join(&u), 0);
	CHECK_EQ(stats_of(&f).slabs_dirty, 1);
	close(writer);
	close(other);
	tear_down(&f);
}

/* A lease is destroyed while an unmap of its slot waits: both end. */
static void test_destroy_during_unmap(void)
{
	struct fixture f;
	struct leased leased;
	struct unmapping u;
	char half[2048], byte;
	int writer, other;

	set_up(&f, SMALL_BYTES, 1);
	leased = lease_slots(&f, 1);
	u = (struct unmapping){.f = &f,
			       .lease = leased.lease,
			       .mapped = map_slab(&f, leased.lease),
			       .wait_ms_max = WAIT_S * 1000};
	writer = open_export(f.port, leased.token);
	other = open_export(f.port, leased.token);
	memset(half, 0x55, sizeof(half));
	CHECK(say_request(writer, NBD_CMD_WRITE, 0, 8, 0, 4096));
	CHECK(say(writer, half, sizeof(half)));
	WAIT_FOR(holders(&f, leased.lease, u.mapped) == 1);
	unmap_start(&u);
	WAIT_FOR(do_read(other, 8192, &byte, 1) == NBD_EIO);
	CHECK_EQ(isw_store_lease_destroy(f.store, leased.lease), 0);
	CHECK_EQ(unmap_join(&u), 0);
	CHECK_EQ(stats_of(&f).slabs_dirty, 1);
	close(writer);
	close(other);
	tear_down(&f);
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
static void test_no_late_write_after_renew(void)
{
	char token[ISW_TOKEN_TEXT_BYTES], page[4096];
	struct fixture f;
	struct leased leased;

	set_up(&f, SMALL_BYTES, 1);
	leased = lease_slots(&f, 1);
	map_slab(&f, leased.lease);
	strcpy(token, leased.token);
	for (unsigned round = 0; round < 20; round++) {
		struct old_writer old = {.fd = open_export(f.port, token)};
		int slow = open_export(f.port, token), fd;
		pthread_t thread;

		CHECK(say_request(slow, NBD_CMD_WRITE, 0, 1, 4096 * 8, 4096));
		CHECK(say(slow, "half", 4));
		CHECK_EQ(iswi_thread_start(&thread, "old", old_writer_main, &old), 0);
		WAIT_FOR(atomic_load(&old.written) > 100);
		CHECK_EQ(isw_store_lease_renew(f.store, leased.lease, WAIT_S * 1000, token), 0);
		fd = open_export(f.port, token);
		for (unsigned i = 0; i < 9; i++)
			fill(fd, 4096 * i, 0x22, 4096);
		say(slow, page, 4092);
		for (unsigned i = 0; i < 45; i++) {
			CHECK_EQ(do_read(fd, 4096 * (i % 9), page, sizeof(page)), 0);
			CHECK(all_bytes(page, 0x22, sizeof(page)));
		}
		pthread_join(thread, NULL);
		close(old.fd);
		close(slow);
		close(fd);
	}
	give_back(&f, leased.lease);
	tear_down(&f);
}

/*
 * A connection busy zeroing a large slab cannot end at once. A renewal that does not wait for it
 * grants nothing: from then on the old token is dead and there is no new one, until a renewal
 * that has seen it end.
 */
static void test_renewal_that_cannot_wait(void)
{
	const uint32_t bytes = 64u << 20;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct fixture f;
	struct leased leased;
	struct mapped mapped;
	int err = 0, late;

	set_up(&f, bytes, 1);
	leased = lease_slots(&f, 1);
	mapped = map_slab(&f, leased.lease);
	/* The scheduler may give it the time after all, but not every time. */
	for (unsigned attempt = 0; attempt < 20 && err == 0; attempt++) {
		int busy = open_export(f.port, leased.token);

		for (unsigned i = 0; i < 32; i++)
			CHECK(say_request(busy, NBD_CMD_WRITE_ZEROES, 0, i, 0, bytes));
		WAIT_FOR(holders(&f, leased.lease, mapped) == 1);
		strcpy(token, leased.token);
		err = isw_store_lease_renew(f.store, leased.lease, 0, leased.token);
		close(busy);
	}
	CHECK_EQ(err, -ETIMEDOUT);
	CHECK(strcmp(token, leased.token) == 0);
	late = dial(f.port);
	CHECK_EQ(try_open(late, token), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(isw_store_lease_renew(f.store, leased.lease, WAIT_S * 1000, token), 0);
	CHECK_EQ(ask_export(late, NBD_OPT_GO, leased.token, NULL), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(ask_export(late, NBD_OPT_GO, token, NULL), NBD_REP_ACK);
	close(late);
	tear_down(&f);
}

/* ---- the fence alone, as fast as it goes: the windows are a few instructions wide */

#define DIRECT_ROUNDS 20000u
#define TAKEN_AWAY    0xdeadu

struct holder {
	struct iswi_nbd_export export;
	atomic_bool *ending;
	atomic_uint held, refused; /* relaxed: shows that both were tried */
	pthread_t thread;
};

static void *holder_main(void *opaque)
{
	struct holder *h = opaque;

	while (!atomic_load(h->ending)) {
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
static void test_fence_alone(void)
{
	struct holder holders[2] = {0};
	atomic_bool ending = false;
	struct leased leased;
	struct fixture f;
	char nobody; /* stands for a connection. Were one shut without need, it would show */

	set_up(&f, ISW_PAGE_BYTES, 1);
	leased = lease_slots(&f, 1);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++) {
		holders[i].ending = &ending;
		CHECK_EQ(iswi_store_backend.open(f.store, leased.token, ISWI_TOKEN_BYTES,
						 (struct iswi_nbd_conn *)&nobody,
						 &holders[i].export),
			 0);
		CHECK_EQ(iswi_thread_start(&holders[i].thread, "holder", holder_main, &holders[i]),
			 0);
	}
	for (unsigned i = 0; i < DIRECT_ROUNDS; i++) {
		struct mapped mapped = map_slab(&f, leased.lease);

		CHECK_EQ(unmap_slab(&f, leased.lease, mapped, WAIT_S * 1000), 0);
		atomic_store((atomic_uint *)f.store->slabs[0].mem.base, TAKEN_AWAY);
		CHECK_EQ(isw_store_scrub(f.store), 0);
	}
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++)
		WAIT_FOR(atomic_load(&holders[i].refused) > 0);
	map_slab(&f, leased.lease);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++)
		WAIT_FOR(atomic_load(&holders[i].held) > 0);
	atomic_store(&ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(holders); i++) {
		pthread_join(holders[i].thread, NULL);
		iswi_store_backend.close(f.store, &holders[i].export,
					 (struct iswi_nbd_conn *)&nobody);
	}
	tear_down(&f);
}

/* ---- everything at once */

#define HAMMER_SLABS  3u
#define HAMMER_SLOTS  2u
#define HAMMER_ROUNDS 150u
#define TENANTS       4u

struct tenant {
	const struct fixture *f;
	unsigned char tag;
	uint64_t page; /* of each slot this client keeps to: two do not share bytes */
	pthread_t thread;
	pthread_mutex_t *lock; /* lease, token, as they change */
	struct leased *leased;
	atomic_bool *ending;
	atomic_ullong reads, refusals; /* relaxed: show that both were tried */
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
		t->reads++;
	} else {
		CHECK_EQ(error, NBD_EIO);
		t->refusals++;
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

	while (!atomic_load(t->ending)) {
		char token[ISW_TOKEN_TEXT_BYTES];
		int fd = dial(t->f->port);

		pthread_mutex_lock(t->lock);
		strcpy(token, t->leased->token);
		pthread_mutex_unlock(t->lock);
		if (try_open(fd, token) == 0)
			while (!atomic_load(t->ending) && tenant_step(t, fd, i))
				i++;
		close(fd);
	}
	return NULL;
}

struct landlord {
	struct fixture f;
	pthread_mutex_t lock;
	struct leased leased[2];
	struct mapped mapped[2][HAMMER_SLOTS]; /* generation 0: not mapped */
	atomic_bool ending;
};

static uint32_t random_next(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 16;
}

/* Takes a slab from one lease or gives one; now and then a fresh token, or a fresh lease. */
static void landlord_step(struct landlord *l, uint32_t *random)
{
	const unsigned who = random_next(random) % 2, what = random_next(random) % 16;
	struct leased *leased = &l->leased[who];
	struct mapped *mapped = &l->mapped[who][random_next(random) % HAMMER_SLOTS];
	char token[ISW_TOKEN_TEXT_BYTES];
	int err;

	if (what == 0) {
		CHECK_EQ(isw_store_lease_renew(l->f.store, leased->lease, WAIT_S * 1000, token), 0);
		pthread_mutex_lock(&l->lock);
		strcpy(leased->token, token);
		pthread_mutex_unlock(&l->lock);
	} else if (what == 1) {
		CHECK_EQ(isw_store_lease_destroy(l->f.store, leased->lease), 0);
		pthread_mutex_lock(&l->lock);
		*leased = lease_slots(&l->f, HAMMER_SLOTS);
		pthread_mutex_unlock(&l->lock);
		memset(l->mapped[who], 0, sizeof(l->mapped[who]));
	} else if (mapped->generation != 0) {
		CHECK_EQ(unmap_slab(&l->f, leased->lease, *mapped, what % 2 ? 0 : WAIT_S * 1000),
			 0);
		mapped->generation = 0;
	} else {
		err = isw_store_map(l->f.store, leased->lease, 0, &mapped->slot,
				    &mapped->generation);
		CHECK(err == 0 || err == -ENOENT || err == -EAGAIN);
		if (err != 0)
			mapped->generation = 0;
	}
	while (isw_store_scrub(l->f.store) == 0)
		;
}

/* Whether bytes were read, and a request was refused. */
static bool all_tried(struct tenant *tenants)
{
	unsigned long long reads = 0, refusals = 0;

	for (unsigned i = 0; i < TENANTS; i++) {
		reads += atomic_load_explicit(&tenants[i].reads, memory_order_relaxed);
		refusals += atomic_load_explicit(&tenants[i].refusals, memory_order_relaxed);
	}
	return reads > 0 && refusals > 0;
}

static void test_tenants_never_meet(void)
{
	static struct landlord l;
	static struct tenant tenants[TENANTS];
	uint32_t random = 12345;

	set_up(&l.f, SMALL_BYTES, HAMMER_SLABS);
	pthread_mutex_init(&l.lock, NULL);
	atomic_init(&l.ending, false);
	for (unsigned i = 0; i < 2; i++)
		l.leased[i] = lease_slots(&l.f, HAMMER_SLOTS);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(tenants); i++) {
		tenants[i] = (struct tenant){
			.f = &l.f,
			.tag = (unsigned char)(0xa1 + i % 2),
			.page = i / 2,
			.lock = &l.lock,
			.leased = &l.leased[i % 2],
			.ending = &l.ending,
		};
		CHECK_EQ(iswi_thread_start(&tenants[i].thread, "tenant", tenant_main, &tenants[i]),
			 0);
	}
	/* On a machine that others use it takes them longer to get anything done. */
	for (unsigned round = 0; round < HAMMER_ROUNDS || !all_tried(tenants); round++) {
		landlord_step(&l, &random);
		if (round % 4 == 0)
			sleep_ms(2); /* let the tenants use what they have */
	}
	atomic_store(&l.ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(tenants); i++)
		pthread_join(tenants[i].thread, NULL);
	tear_down(&l.f);
	pthread_mutex_destroy(&l.lock);
}

int main(void)
{
	test_half_sent_answer_holds_the_slab();
	test_forced_unmap_of_a_deaf_reader();
	test_slow_write_ends_with_forced_unmap();
	test_slot_taken_by_force_waits_for_old_connections();
	test_write_under_way_is_waited_for();
	test_destroy_during_unmap();
	test_no_late_write_after_renew();
	test_renewal_that_cannot_wait();
	test_fence_alone();
	test_tenants_never_meet();
	return 0;
}
