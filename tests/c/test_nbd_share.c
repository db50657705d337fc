// SPDX-License-Identifier: Apache-2.0
/* Request buffers shared by connections: how many each gets, alone, with others, and after them. */
#include "frontend/nbd_share.h"
#include "nbd_fixture.h"
#include "tests_between.h"

#define CLIENTS_MAX 16u
#define COUNT_MAX   64u

static struct iswi_nbd_share share;
static struct iswi_nbd_request requests[COUNT_MAX];
static struct iswi_nbd_client *clients[CLIENTS_MAX];
/* One more while it is exchanged. */
static struct iswi_nbd_request *held[CLIENTS_MAX][COUNT_MAX + 1];
static uint32_t taken[CLIENTS_MAX]; /* of held */

static void set_up(uint32_t count, bool fair)
{
	CHECK_EQ(iswi_nbd_share_init(&share, CLIENTS_MAX, count, fair), 0);
	for (uint32_t i = 0; i < count; i++)
		iswi_nbd_share_add(&share, &requests[i]);
}

static void give_back(unsigned who, uint32_t count)
{
	for (; count > 0; count--)
		iswi_nbd_share_give(clients[who], held[who][--taken[who]]);
}

static void leave(unsigned who)
{
	give_back(who, taken[who]);
	iswi_nbd_share_leave(clients[who]);
	clients[who] = NULL;
}

static void tear_down(void)
{
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		if (clients[i] != NULL)
			leave(i);
	CHECK_EQ(share.free_count, share.count);
	CHECK_EQ(share.joined, 0);
	CHECK_EQ(share.served, 0);
	CHECK_EQ(share.waiting, 0);
	iswi_nbd_share_fini(&share);
}

static void *taker_main(void *opaque)
{
	const uintptr_t who = (uintptr_t)opaque;

	held[who][taken[who]] = iswi_nbd_share_take(clients[who]);
	return NULL;
}

static uint32_t waiting(void)
{
	uint32_t count;

	pthread_mutex_lock(&share.lock);
	count = share.waiting;
	pthread_mutex_unlock(&share.lock);
	return count;
}

#define SHARED_TEST(name) BETWEEN_TEST(name, set_up(64, true), tear_down())

/* Takes until the next one would have to wait; that one is let through by giving one back. */
static uint32_t take_all(unsigned who)
{
	pthread_t thread;

	for (;;) {
		uint32_t before = taken[who];
		bool done = false;

		CHECK_EQ(iswi_thread_start(&thread, "taker", taker_main, (void *)(uintptr_t)who),
			 0);
		while (!done && waiting() == 0)
			done = pthread_tryjoin_np(thread, NULL) == 0;
		if (!done && before == 0)
			return UINT32_MAX; /* it waits for others: the test has failed */
		if (done) {
			taken[who]++;
			continue;
		}
		/* The first is exchanged for the one that was waited for. */
		iswi_nbd_share_give(clients[who], held[who][0]);
		pthread_join(thread, NULL);
		held[who][0] = held[who][before];
		return before;
	}
}

static void join(unsigned who)
{
	clients[who] = iswi_nbd_share_join(&share);
}

/* Of 64 one that is alone gets 49: each of the other 15 places keeps one. */
SHARED_TEST(test_a_lone_connection_gets_nearly_all)
{
	join(0);
	CHECK_EQ(take_all(0), 49);
	CHECK(!iswi_nbd_share_exceeded(clients[0]));
}

TEST_CASES(test_shares_are_equal, 7, n)
{
	static const struct {
		unsigned clients;
		uint32_t each;
	} cases[] = {{1, 49}, {2, 25}, {3, 17}, {4, 13}, {8, 7}, {15, 4}, {16, 4}};

	set_up(64, true);
	for (unsigned who = 0; who < cases[n].clients; who++)
		join(who);
	for (unsigned who = 0; who < cases[n].clients; who++)
		CHECK_EQ(take_all(who), cases[n].each);
	tear_down();
}

/* However much the first holds and keeps, everybody who comes gets one at once. */
SHARED_TEST(test_who_comes_later_gets_one_at_once)
{
	join(0);
	CHECK_EQ(take_all(0), 49);
	for (unsigned who = 1; who < CLIENTS_MAX; who++) {
		join(who);
		CHECK_EQ(take_all(who), 1);
	}
}

/* What comes back from who holds too much goes to the others, until all have the same. */
SHARED_TEST(test_shares_follow_the_number_of_connections)
{
	join(0);
	CHECK_EQ(take_all(0), 49);
	join(1);
	CHECK(iswi_nbd_share_exceeded(clients[0]));
	CHECK_EQ(take_all(1), 1);
	give_back(0, 23);
	CHECK(iswi_nbd_share_exceeded(clients[0]));
	give_back(0, 1);
	CHECK(!iswi_nbd_share_exceeded(clients[0]));
	CHECK_EQ(take_all(1), 25);
	CHECK_EQ(take_all(0), 25);
	leave(1);
	CHECK_EQ(take_all(0), 49);
}

/* One that waits for its share is woken when another leaves, not only when something is given. */
SHARED_TEST(test_a_share_that_grows_wakes)
{
	pthread_t thread;

	join(0);
	join(1);
	CHECK_EQ(take_all(0), 25);
	CHECK_EQ(iswi_thread_start(&thread, "taker", taker_main, NULL), 0); /* the first */
	WAIT_FOR(waiting() == 1);
	leave(1);
	pthread_join(thread, NULL);
	taken[0]++;
}

/* More connections than buffers: each takes one at a time, and all have their turn. */
TEST(test_fewer_buffers_than_connections)
{
	set_up(8, true);
	join(0);
	CHECK_EQ(take_all(0), 7);
	give_back(0, 7);
	for (unsigned who = 1; who < CLIENTS_MAX; who++)
		join(who);
	for (unsigned who = 0; who < CLIENTS_MAX; who++) {
		CHECK_EQ(take_all(who), 1);
		give_back(who, 1);
	}
	tear_down();
	set_up(1, true);
	join(0);
	CHECK_EQ(take_all(0), 1);
	tear_down();
}

/* The kernel bounds its own connections: every request finds a buffer. */
BETWEEN_TEST(test_no_shares_where_there_are_to_be_none, set_up(64, false), tear_down())
{
	for (unsigned who = 0; who < 4; who++)
		join(who);
	CHECK_EQ(take_all(0), 64);
	CHECK(!iswi_nbd_share_exceeded(clients[0]));
}

/* Connections that come, take what they can and go: nobody waits for ever, nothing is lost. */
static void *hammer_main(void *opaque)
{
	const uintptr_t who = (uintptr_t)opaque;

	for (unsigned round = 0; round < 200; round++) {
		struct iswi_nbd_client *client = iswi_nbd_share_join(&share);

		for (unsigned i = 0; i < 8; i++) {
			struct iswi_nbd_request *first = iswi_nbd_share_take(client), *second;

			/* A share is two at least here; more than one's share would not come. */
			second = iswi_nbd_share_take(client);
			CHECK(first != second);
			first->offset = second->offset = who;
			iswi_nbd_share_give(client, first);
			CHECK_EQ(second->offset, who);
			iswi_nbd_share_give(client, second);
		}
		iswi_nbd_share_leave(client);
	}
	return NULL;
}

SHARED_TEST(test_many_at_once)
{
	at_once(CLIENTS_MAX, hammer_main);
}
