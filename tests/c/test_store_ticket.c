// SPDX-License-Identifier: Apache-2.0
/*
 * Tickets travel in the clear. What somebody who reads one can do with it: nothing, once its owner
 * has used it, once 10 s have passed, and once the owner has got a later one.
 */
#include <sched.h>

#include "store/store.h"
#include "store_fixture.h"

#define SLAB_BYTES (16u * 4096u)
#define GOOD_MS    10000u
#define THIEVES    32u

/* ---- a clock that stands still until it is told otherwise */

static atomic_uint_fast64_t now_ns;

static uint64_t clock_now_ns(void *ctx)
{
	(void)ctx;
	return atomic_load(&now_ns);
}

static const struct iswi_clock standing = {.now_ns = clock_now_ns};

static void pass_ms(uint64_t ms)
{
	atomic_fetch_add(&now_ns, ms * 1000000u);
}

static uint64_t lease;

static void begin(uint64_t slab_bytes)
{
	set_up(slab_bytes, 1);
	store->clock = &standing;
	CHECK_EQ(isw_store_lease_create(store, 1, &lease, NULL), 0);
	map_slab(lease);
}

#define TICKET_TEST(name) BETWEEN_TEST(name, begin(SLAB_BYTES), tear_down())

struct text {
	char text[ISW_TICKET_TEXT_BYTES];
};

static int ask(uint32_t number, uint32_t wait_ms_max, struct text *ticket)
{
	const struct isw_ticket_config config = {
		.number = number,
		.uses = 1,
		.good_ms = GOOD_MS,
		.wait_ms_max = wait_ms_max,
	};

	return isw_store_ticket(store, lease, &config, ticket->text);
}

static struct text ticket_for(uint32_t number)
{
	struct text ticket;

	CHECK_EQ(ask(number, WAIT_S * 1000, &ticket), 0);
	return ticket;
}

/* What a connection of its own gets with that name. */
static uint32_t outcome(const char *name)
{
	int fd = dial(port);
	uint32_t type = try_open(fd, name);

	close(fd);
	return type;
}

static uint32_t connections(void)
{
	return lease_stats(lease).connections;
}

/* ---- used, late, replayed */

TICKET_TEST(test_a_ticket_opens_one_connection)
{
	struct text ticket = ticket_for(0);
	int fd = dial(port);

	/* Who only asks what it is does not use it up. */
	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	CHECK_EQ(ask_export(fd, NBD_OPT_INFO, ticket.text, NULL), NBD_REP_ACK);
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, ticket.text, NULL), NBD_REP_ACK);
	/* A replay, while the first lives and afterwards. */
	CHECK_EQ(outcome(ticket.text), NBD_REP_ERR_UNKNOWN);
	fill_bytes(fd, 0, 7, 4096);
	close(fd);
	WAIT_FOR(connections() == 0);
	CHECK_EQ(outcome(ticket.text), NBD_REP_ERR_UNKNOWN);
}

TICKET_TEST(test_a_ticket_is_good_for_ten_seconds)
{
	struct text ticket = ticket_for(0);
	int fd;

	pass_ms(GOOD_MS);
	CHECK_EQ(outcome(ticket.text), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(iswi_lease_find(store, lease)->tickets_live, 0);
	ticket = ticket_for(0);
	pass_ms(GOOD_MS - 1);
	fd = open_export(port, ticket.text);
	/* The time is the ticket's. A connection lives on when nobody gives tickets any more. */
	pass_ms(3600000);
	fill_bytes(fd, 0, 5, 4096);
	check_bytes(fd, 0, 5, 4096);
	close(fd);
}

TICKET_TEST(test_the_owner_first)
{
	struct text mine[2] = {ticket_for(0), ticket_for(1)};
	int fds[2];

	for (unsigned i = 0; i < 2; i++)
		fds[i] = open_export(port, mine[i].text);
	for (unsigned i = 0; i < 2; i++)
		CHECK_EQ(outcome(mine[i].text), NBD_REP_ERR_UNKNOWN);
	for (unsigned i = 0; i < 2; i++) {
		fill_bytes(fds[i], 0, 1 + (int)i, 4096);
		close(fds[i]);
	}
}

/* Nothing that the thief has sent lands after the owner has got the later ticket. */
TICKET_TEST(test_the_thief_first)
{
	struct text mine = ticket_for(0), other = ticket_for(1);
	int thief = open_export(port, mine.text), neighbour = open_export(port, other.text), fd;
	char half[4096] = {0};

	fill_bytes(thief, 0, 0x66, 4096);
	CHECK(say_request(thief, NBD_CMD_WRITE, 0, 1, 0, 4096));
	CHECK(say(thief, half, 4092));
	CHECK_EQ(outcome(mine.text), NBD_REP_ERR_UNKNOWN);
	mine = ticket_for(0);
	CHECK_EQ(connections(), 1);
	hear_close(thief);
	fd = open_export(port, mine.text);
	fill_bytes(fd, 0, 0x11, 4096);
	say(thief, half, 4);
	/* The connection of the other number goes on. */
	check_bytes(neighbour, 0, 0x11, 4096);
	check_bytes(fd, 0, 0x11, 4096);
	close(thief);
	close(neighbour);
	close(fd);
}

/* ---- many */

static atomic_uint got_in;
static atomic_bool go;

struct thief {
	pthread_t thread;
	const char *name;
	int fd;
};

static void *thief_main(void *opaque)
{
	struct thief *t = opaque;

	t->fd = dial(port);
	greet(t->fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	while (!atomic_load(&go))
		sched_yield();
	if (ask_export(t->fd, NBD_OPT_GO, t->name, NULL) == NBD_REP_ACK)
		atomic_fetch_add(&got_in, 1);
	return NULL;
}

TICKET_TEST(test_thirty_two_thieves_at_once)
{
	for (unsigned round = 0; round < 8; round++) {
		struct text ticket = ticket_for(0);
		struct thief thieves[THIEVES];
		int fd;

		atomic_store(&got_in, 0);
		atomic_store(&go, false);
		for (unsigned i = 0; i < THIEVES; i++) {
			thieves[i].name = ticket.text;
			CHECK_EQ(iswi_thread_start(&thieves[i].thread, "thief", thief_main,
						   &thieves[i]),
				 0);
		}
		atomic_store(&go, true);
		for (unsigned i = 0; i < THIEVES; i++)
			pthread_join(thieves[i].thread, NULL);
		CHECK_EQ(atomic_load(&got_in), 1);
		CHECK_EQ(connections(), 1);
		/* The owner comes last, and has the connection. */
		ticket = ticket_for(0);
		CHECK_EQ(connections(), 0);
		fd = open_export(port, ticket.text);
		fill_bytes(fd, 0, (int)round, 4096);
		for (unsigned i = 0; i < THIEVES; i++)
			close(thieves[i].fd);
		close(fd);
		WAIT_FOR(store_stats().connections == 0);
	}
}

TICKET_TEST(test_guesses)
{
	struct text mine = ticket_for(0), guess;
	int fd = dial(port);

	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	for (unsigned i = 0; i < 16; i++) {
		guess = mine;
		guess.text[2 * i] = guess.text[2 * i] == '0' ? '1' : '0';
		CHECK_EQ(ask_export(fd, NBD_OPT_GO, guess.text, NULL), NBD_REP_ERR_UNKNOWN);
		CHECK_EQ(ask_export(fd, NBD_OPT_INFO, guess.text, NULL), NBD_REP_ERR_UNKNOWN);
	}
	memset(guess.text, '0', ISWI_TICKET_BYTES);
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, guess.text, NULL), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(store_stats().connections_refused, 33);
	/* That has not used it up. */
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, mine.text, NULL), NBD_REP_ACK);
	close(fd);
}

/* ---- what ends tickets */

TICKET_TEST(test_an_earlier_ticket_is_worthless)
{
	struct text earlier = ticket_for(3), later = ticket_for(3);
	int fd;

	CHECK(strcmp(earlier.text, later.text) != 0);
	CHECK_EQ(outcome(earlier.text), NBD_REP_ERR_UNKNOWN);
	fd = open_export(port, later.text);
	CHECK_EQ(isw_store_ticket_end(store, lease, 3), 0);
	await_close(fd);
	later = ticket_for(3);
	CHECK_EQ(isw_store_ticket_end(store, lease, 3), 0);
	CHECK_EQ(outcome(later.text), NBD_REP_ERR_UNKNOWN);
}

TICKET_TEST(test_a_renewal_ends_them_all)
{
	struct text tickets[ISW_TICKET_NUMBERS];

	for (uint32_t i = 0; i < ISW_TICKET_NUMBERS; i++)
		tickets[i] = ticket_for(i);
	CHECK_EQ(isw_store_lease_renew(store, lease, WAIT_S * 1000), 0);
	CHECK_EQ(iswi_lease_find(store, lease)->tickets_live, 0);
	for (uint32_t i = 0; i < ISW_TICKET_NUMBERS; i += 8)
		CHECK_EQ(outcome(tickets[i].text), NBD_REP_ERR_UNKNOWN);
}

TICKET_TEST(test_tickets_that_there_are_not)
{
	struct isw_ticket_config config = {.number = ISW_TICKET_NUMBERS, .uses = 1};
	struct text ticket;

	CHECK_EQ(isw_store_ticket(store, lease, &config, ticket.text), -EINVAL);
	CHECK_EQ(isw_store_ticket_end(store, lease, ISW_TICKET_NUMBERS), -EINVAL);
	config = (struct isw_ticket_config){.number = 0, .uses = 0};
	CHECK_EQ(isw_store_ticket(store, lease, &config, ticket.text), -EINVAL);
	config.uses = 1;
	CHECK_EQ(isw_store_ticket(store, lease + 1, &config, ticket.text), -ENOENT);
	CHECK_EQ(isw_store_ticket_end(store, lease + 1, 0), -ENOENT);
	/* As between a renewal that could not fence and the next one. */
	iswi_lease_find(store, lease)->open = false;
	CHECK_EQ(isw_store_ticket(store, lease, &config, ticket.text), -EBUSY);
}

/* One for programs: as many connections as were asked for, for as long as it takes. */
TICKET_TEST(test_a_lasting_ticket)
{
	const struct isw_ticket_config config = {.number = 32, .uses = 3};
	struct text lasting;
	int fds[3];

	CHECK_EQ(isw_store_ticket(store, lease, &config, lasting.text), 0);
	pass_ms(86400000);
	for (unsigned i = 0; i < 3; i++)
		fds[i] = open_export(port, lasting.text);
	CHECK_EQ(outcome(lasting.text), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(isw_store_ticket_end(store, lease, 32), 0);
	for (unsigned i = 0; i < 3; i++)
		await_close(fds[i]);
}

/* A holder busy zeroing a large slab cannot end at once. Until it has there is no later ticket. */
BETWEEN_TEST(test_a_holder_that_does_not_end, begin(64u << 20), tear_down())
{
	const uint32_t bytes = 64u << 20;
	struct text ticket, later;
	int err = 0;

	wait_as_told();
	for (unsigned attempt = 0; attempt < ENDS_IN_TIME_MAX && err == 0; attempt++) {
		int busy;

		ticket = ticket_for(0);
		busy = open_export(port, ticket.text);
		for (unsigned i = 0; i < 32; i++)
			CHECK(say_request(busy, NBD_CMD_WRITE_ZEROES, 0, i, 0, bytes));
		WAIT_FOR(atomic_load(&iswi_lease_find(store, lease)->slots[0].refs) == 1);
		err = ask(0, 0, &later);
		close(busy);
	}
	CHECK_EQ(err, -ETIMEDOUT);
	CHECK_EQ(iswi_lease_find(store, lease)->tickets_live, 0);
	later = ticket_for(0);
	close(open_export(port, later.text));
}

/* ---- everything at once, for the sanitizers */

#define ROUNDS 300u

static void *asker_main(void *opaque)
{
	const uint32_t number = (uint32_t)(uintptr_t)opaque;

	for (unsigned i = 0; i < ROUNDS; i++) {
		struct text ticket;
		int err = ask(number, WAIT_S * 1000, &ticket);

		CHECK(err == 0 || err == -EBUSY);
		if (err == 0 && i % 2 == 0)
			outcome(ticket.text);
		if (i % 64 == 63 && number == 0) {
			err = isw_store_lease_renew(store, lease, WAIT_S * 1000);
			CHECK(err == 0 || err == -EBUSY);
		}
	}
	return NULL;
}

TICKET_TEST(test_askers_and_renewals_at_once)
{
	pthread_t threads[4];

	/* Two ask for the same number. */
	for (uintptr_t i = 0; i < 4; i++)
		CHECK_EQ(iswi_thread_start(&threads[i], "asker", asker_main, (void *)(i % 3)), 0);
	for (unsigned i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	CHECK_EQ(isw_store_lease_destroy(store, lease), 0);
}
