// SPDX-License-Identifier: Apache-2.0
/* Request buffers shared by connections: how many each gets, alone, with others, and after them. */
#include "frontend/nbd_share.h"
#include "nbd_fixture.h"

#define CLIENTS_MAX 16u
#define COUNT_MAX   64u

struct fixture {
	struct iswi_nbd_share share;
	struct iswi_nbd_request requests[COUNT_MAX];
	struct iswi_nbd_client *clients[CLIENTS_MAX];
	struct iswi_nbd_request
		*held[CLIENTS_MAX][COUNT_MAX + 1]; /* one more while it is exchanged */
	uint32_t taken[CLIENTS_MAX];               /* of held */
};

static void set_up(struct fixture *f, uint32_t count, bool fair)
{
	memset(f, 0, sizeof(*f));
	CHECK_EQ(iswi_nbd_share_init(&f->share, CLIENTS_MAX, count, fair), 0);
	for (uint32_t i = 0; i < count; i++)
		iswi_nbd_share_add(&f->share, &f->requests[i]);
}

static void give_back(struct fixture *f, unsigned who, uint32_t count)
{
	for (; count > 0; count--)
		iswi_nbd_share_give(f->clients[who], f->held[who][--f->taken[who]]);
}

static void leave(struct fixture *f, unsigned who)
{
	give_back(f, who, f->taken[who]);
	iswi_nbd_share_leave(f->clients[who]);
	f->clients[who] = NULL;
}

static void tear_down(struct fixture *f)
{
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		if (f->clients[i] != NULL)
			leave(f, i);
	CHECK_EQ(f->share.free_count, f->share.count);
	CHECK_EQ(f->share.joined, 0);
	CHECK_EQ(f->share.served, 0);
	CHECK_EQ(f->share.waiting, 0);
	iswi_nbd_share_fini(&f->share);
}

struct taker {
	struct fixture *f;
	unsigned who;
};

static void *taker_main(void *opaque)
{
	struct taker *taker = opaque;
	struct fixture *f = taker->f;

	f->held[taker->who][f->taken[taker->who]] = iswi_nbd_share_take(f->clients[taker->who]);
	return NULL;
}

static uint32_t waiting(struct fixture *f)
{
	uint32_t count;

	pthread_mutex_lock(&f->share.lock);
	count = f->share.waiting;
	pthread_mutex_unlock(&f->share.lock);
	return count;
}

/* Takes until the next one would have to wait; that one is let through by giving one back. */
static uint32_t take_all(struct fixture *f, unsigned who)
{
	struct taker taker = {.f = f, .who = who};
	pthread_t thread;

	for (;;) {
		uint32_t before = f->taken[who];
		bool done = false;

		CHECK_EQ(iswi_thread_start(&thread, "taker", taker_main, &taker), 0);
		while (!done && waiting(f) == 0)
			done = pthread_tryjoin_np(thread, NULL) == 0;
		if (!done && before == 0)
			return UINT32_MAX; /* it waits for others: the test has failed */
		if (done) {
			f->taken[who]++;
			continue;
		}
		/* The first is exchanged for the one that was waited for. */
		iswi_nbd_share_give(f->clients[who], f->held[who][0]);
		pthread_join(thread, NULL);
		f->held[who][0] = f->held[who][before];
		return before;
	}
}

static void join(struct fixture *f, unsigned who)
{
	f->clients[who] = iswi_nbd_share_join(&f->share);
}

/* Of 64 one that is alone gets 49: each of the other 15 places keeps one. */
static void test_a_lone_connection_gets_nearly_all(struct fixture *f)
{
	join(f, 0);
	CHECK_EQ(take_all(f, 0), 49);
	CHECK(!iswi_nbd_share_exceeded(f->clients[0]));
}

static void test_shares_are_equal(void)
{
	static struct fixture f;
	static const struct {
		unsigned clients;
		uint32_t each;
	} cases[] = {{1, 49}, {2, 25}, {3, 17}, {4, 13}, {8, 7}, {15, 4}, {16, 4}};

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		set_up(&f, 64, true);
		for (unsigned who = 0; who < cases[i].clients; who++)
			join(&f, who);
		for (unsigned who = 0; who < cases[i].clients; who++)
			CHECK_EQ(take_all(&f, who), cases[i].each);
		tear_down(&f);
	}
}

/* However much the first holds and keeps, everybody who comes gets one at once. */
static void test_who_comes_later_gets_one_at_once(struct fixture *f)
{
	join(f, 0);
	CHECK_EQ(take_all(f, 0), 49);
	for (unsigned who = 1; who < CLIENTS_MAX; who++) {
		join(f, who);
		CHECK_EQ(take_all(f, who), 1);
	}
}

/* What comes back from who holds too much goes to the others, until all have the same. */
static void test_shares_follow_the_number_of_connections(struct fixture *f)
{
	join(f, 0);
	CHECK_EQ(take_all(f, 0), 49);
	join(f, 1);
	CHECK(iswi_nbd_share_exceeded(f->clients[0]));
	CHECK_EQ(take_all(f, 1), 1);
	give_back(f, 0, 23);
	CHECK(iswi_nbd_share_exceeded(f->clients[0]));
	give_back(f, 0, 1);
	CHECK(!iswi_nbd_share_exceeded(f->clients[0]));
	CHECK_EQ(take_all(f, 1), 25);
	CHECK_EQ(take_all(f, 0), 25);
	leave(f, 1);
	CHECK_EQ(take_all(f, 0), 49);
}

/* One that waits for its share is woken when another leaves, not only when something is given. */
static void test_a_share_that_grows_wakes(struct fixture *f)
{
	struct taker taker = {.f = f, .who = 0};
	pthread_t thread;

	join(f, 0);
	join(f, 1);
	CHECK_EQ(take_all(f, 0), 25);
	CHECK_EQ(iswi_thread_start(&thread, "taker", taker_main, &taker), 0);
	WAIT_FOR(waiting(f) == 1);
	leave(f, 1);
	pthread_join(thread, NULL);
	f->taken[0]++;
}

/* More connections than buffers: each takes one at a time, and all have their turn. */
static void test_fewer_buffers_than_connections(void)
{
	static struct fixture f;

	set_up(&f, 8, true);
	join(&f, 0);
	CHECK_EQ(take_all(&f, 0), 7);
	give_back(&f, 0, 7);
	for (unsigned who = 1; who < CLIENTS_MAX; who++)
		join(&f, who);
	for (unsigned who = 0; who < CLIENTS_MAX; who++) {
		CHECK_EQ(take_all(&f, who), 1);
		give_back(&f, who, 1);
	}
	tear_down(&f);
	set_up(&f, 1, true);
	join(&f, 0);
	CHECK_EQ(take_all(&f, 0), 1);
	tear_down(&f);
}

/* The kernel bounds its own connections: every request finds a buffer. */
static void test_no_shares_where_there_are_to_be_none(struct fixture *f)
{
	for (unsigned who = 0; who < 4; who++)
		join(f, who);
	CHECK_EQ(take_all(f, 0), 64);
	CHECK(!iswi_nbd_share_exceeded(f->clients[0]));
}

/* Connections that come, take what they can and go: nobody waits for ever, nothing is lost. */
static void *hammer_main(void *opaque)
{
	struct taker *h = opaque;
	struct iswi_nbd_share *share = &h->f->share;

	for (unsigned round = 0; round < 200; round++) {
		struct iswi_nbd_client *client = iswi_nbd_share_join(share);

		for (unsigned i = 0; i < 8; i++) {
			struct iswi_nbd_request *first = iswi_nbd_share_take(client), *second;

			/* A share is two at least here; more than one's share would not come. */
			second = iswi_nbd_share_take(client);
			CHECK(first != second);
			first->offset = second->offset = h->who;
			iswi_nbd_share_give(client, first);
			CHECK_EQ(second->offset, h->who);
			iswi_nbd_share_give(client, second);
		}
		iswi_nbd_share_leave(client);
	}
	return NULL;
}

static void test_many_at_once(struct fixture *f)
{
	struct taker hammers[CLIENTS_MAX];
	pthread_t threads[CLIENTS_MAX];

	for (unsigned i = 0; i < CLIENTS_MAX; i++) {
		hammers[i] = (struct taker){.f = f, .who = i};
		CHECK_EQ(iswi_thread_start(&threads[i], "hammer", hammer_main, &hammers[i]), 0);
	}
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		pthread_join(threads[i], NULL);
}

static void run(void (*test)(struct fixture *f), uint32_t count, bool fair)
{
	static struct fixture f;

	set_up(&f, count, fair);
	test(&f);
	tear_down(&f);
}

int main(void)
{
	run(test_a_lone_connection_gets_nearly_all, 64, true);
	test_shares_are_equal();
	run(test_who_comes_later_gets_one_at_once, 64, true);
	run(test_shares_follow_the_number_of_connections, 64, true);
	run(test_a_share_that_grows_wakes, 64, true);
	test_fewer_buffers_than_connections();
	run(test_no_shares_where_there_are_to_be_none, 64, false);
	run(test_many_at_once, 64, true);
	return 0;
}
