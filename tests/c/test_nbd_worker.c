// SPDX-License-Identifier: Apache-2.0
/*
 * One worker for all connections: what one client does, or leaves undone, holds up no other. The
 * process keeps to one processor, so that there is one worker only.
 */
#define OWN_MAIN
#include <poll.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/resource.h>

#include "nbd_memory_fixture.h"

#define PATIENT  (WAIT_S * 1000)
#define MIB      (1u << 20)
#define LOG_SIZE 4096u
#define HALF_AT  (2 * MIB + MIB / 2) /* where a stalled payload lands */

/* What the worker was asked to hold, in its order. Written by the worker, read after answers. */
static struct {
	atomic_bool closed; /* the next hold waits, until it is let through */
	sem_t waits, through;
	atomic_uint count;
	atomic_uint_fast64_t offsets[LOG_SIZE];
} gate;

static _Atomic(struct iswi_nbd_conn *)
	last_conn; /* opened; written before its client hears of it */

static int gated_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		      struct iswi_nbd_export *export_out)
{
	last_conn = conn;
	return test_open(ctx, name, name_bytes, conn, export_out);
}

/* Between open and close only, as a backend with a list of its connections can tell. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;

static void shut_down(struct iswi_nbd_conn *conn)
{
	pthread_mutex_lock(&list_lock);
	iswi_nbd_conn_shutdown(conn);
	pthread_mutex_unlock(&list_lock);
}

static void gated_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	pthread_mutex_lock(&list_lock);
	test_close(ctx, export, conn);
	pthread_mutex_unlock(&list_lock);
}

static int gated_hold(struct iswi_nbd_export *export, uint64_t offset, uint32_t length,
		      struct iswi_nbd_hold *hold_out)
{
	const unsigned number = atomic_fetch_add(&gate.count, 1);

	CHECK(number < LOG_SIZE);
	gate.offsets[number] = offset;
	if (atomic_exchange(&gate.closed, false)) {
		sem_post(&gate.waits);
		CHECK_EQ(sem_wait(&gate.through), 0);
	}
	return test_hold(export, offset, length, hold_out);
}

static const struct iswi_nbd_backend gated_backend = {
	.open = gated_open,
	.close = gated_close,
	.hold = gated_hold,
	.release = test_release,
};

static struct iswi_nbd_server_config config_of(uint32_t send_ms, uint32_t lone_threads_max)
{
	return (struct iswi_nbd_server_config){
		.backend = &gated_backend,
		.connections_max = PLACES,
		.handshake_ms_max = PATIENT,
		.send_ms_max = send_ms,
		.lone_threads_max = lone_threads_max,
	};
}

static void set_up(uint32_t send_ms, uint32_t lone_threads_max)
{
	const struct iswi_nbd_server_config config = config_of(send_ms, lone_threads_max);

	atomic_store(&gate.closed, false);
	atomic_store(&gate.count, 0);
	set_up_with(&config);
	CHECK_EQ(server->worker_count, 1);
}

#define WORKER_TEST(name) BETWEEN_TEST(name, set_up(PATIENT, 0), tear_down())

/* The next request waits in the worker from here on ... */
static void gate_close(void)
{
	atomic_store(&gate.closed, true);
}

/* ... has come there, ... */
static void gate_await(void)
{
	CHECK_EQ(sem_wait(&gate.waits), 0);
}

/* ... and goes on. */
static void gate_open(void)
{
	sem_post(&gate.through);
}

/* How many holds came before the first of this offset. */
static unsigned holds_before(uint64_t offset)
{
	const unsigned count = atomic_load(&gate.count);

	for (unsigned i = 0; i < count; i++)
		if (gate.offsets[i] == offset)
			return i;
	return UINT32_MAX;
}

/* ---- clients that stall, one in each state */

enum { DEAF, HALF_HEADER, HALF_PAYLOAD, STALLS };

/* Returns a connection on which the server waits for its client. */
static int stall(unsigned how)
{
	char page[4096];
	int fd = dial_buffered(port, 4096);

	memset(page, 9, sizeof(page));
	CHECK_EQ(try_open(fd, ""), 0);
	switch (how) {
	case DEAF: /* more than the socket takes */
		for (unsigned i = 0; i < 16; i++)
			CHECK(say_request(fd, NBD_CMD_READ, 0, i, 0, BLOCK_MAX));
		WAIT_FOR(atomic_load(&holds) > 0);
		return fd;
	case HALF_HEADER:
		CHECK(say(fd, "\x25\x60\x95", 3));
		return fd;
	default:
		CHECK(say_request(fd, NBD_CMD_WRITE, 0, 1, HALF_AT, sizeof(page)));
		CHECK(say(fd, page, 1000));
		return fd;
	}
}

static void check_served(int fd)
{
	fill_bytes(fd, 2 * MIB, 3, 65536);
	check_bytes(fd, 2 * MIB, 3, 65536);
	fill_bytes(fd, 2 * MIB, 4, 512);
	check_bytes(fd, 2 * MIB, 4, 512);
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, 2 * MIB, 65536), 0);
}

/* Nothing more comes from the client: what it has said already is served all the same. */
WORKER_TEST(test_request_right_behind_the_handshake)
{
	unsigned char wire[NBD_OPTION_HEADER_BYTES + 6 + NBD_REQUEST_BYTES] = {0};
	const struct nbd_request request = {.command = NBD_CMD_READ, .cookie = 3, .length = 512};
	char page[512];
	uint32_t type;
	int fd = dial(port);

	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	nbd_put_option(wire, NBD_OPT_GO, 6); /* no name, no wishes */
	nbd_put_request(wire + NBD_OPTION_HEADER_BYTES + 6, &request);
	CHECK(say(fd, wire, sizeof(wire)));
	do {
		unsigned char info[64];

		type = hear_option(fd, NBD_OPT_GO, info, sizeof(info), NULL);
	} while (type == NBD_REP_INFO);
	CHECK_EQ(type, NBD_REP_ACK);
	CHECK_EQ(hear_reply(fd, 3, page, sizeof(page)), 0);
	close(fd);
}

/* And each goes on where it was when its client does. */
WORKER_TEST(test_stalled_clients_hold_up_nobody)
{
	static char data[BLOCK_MAX];
	static const char header[NBD_REQUEST_BYTES - 3] = {0x13, 0, 0, 0, NBD_CMD_FLUSH};
	int fds[STALLS], fd = open_export(port, "");

	for (unsigned how = 0; how < STALLS; how++)
		fds[how] = stall(how);
	for (unsigned i = 0; i < 20; i++)
		check_served(fd);
	WAIT_FOR(atomic_load(&holds) == 2); /* of one batch of 2 MiB, and of the payload */
	CHECK(say(fds[HALF_HEADER], header, sizeof(header)));
	CHECK_EQ(hear_reply(fds[HALF_HEADER], 0, NULL, 0), 0);
	memset(data, 9, sizeof(data));
	CHECK(say(fds[HALF_PAYLOAD], data, 3096));
	CHECK_EQ(hear_reply(fds[HALF_PAYLOAD], 1, NULL, 0), 0);
	check_bytes(fd, HALF_AT, 9, 4096);
	for (unsigned i = 0; i < 16; i++)
		CHECK_EQ(hear_reply(fds[DEAF], i, data, sizeof(data)), 0);
	for (unsigned how = 0; how < STALLS; how++) {
		CHECK_EQ(do_command(fds[how], NBD_CMD_FLUSH, 0, 0, 0), 0);
		close(fds[how]);
	}
	close(fd);
}

/* Each ends when its time is over; one that asks for nothing stays. */
BETWEEN_TEST(test_stalled_clients_end, set_up(1000, 0), tear_down())
{
	int fds[STALLS], fd = open_export(port, "");

	for (unsigned how = 0; how < STALLS; how++)
		fds[how] = stall(how);
	WAIT_FOR(atomic_load(&opens) == 1);
	CHECK_EQ(atomic_load(&holds), 0);
	for (unsigned how = 0; how < STALLS; how++)
		await_close(fds[how]);
	/* Who does not take answers has not broken the protocol. */
	CHECK_EQ(server_stats().protocol_errors, 2);
	check_served(fd);
	close(fd);
}

/* A byte now and then is no request: its time began with the first one. */
TEST_CASES(test_dripping_clients_end, 2, payload)
{
	const struct timeval pause = {.tv_usec = 20000};
	char byte;
	int fd;

	set_up(500, 0);
	fd = stall(payload ? HALF_PAYLOAD : HALF_HEADER);
	CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &pause, sizeof(pause)), 0);
	/* What is dripped is too short to be the rest. */
	for (unsigned i = 0; i < (payload ? 3000 : 24); i++)
		if (!say(fd, "", 1) || recv(fd, &byte, 1, 0) == 0 || errno == ECONNRESET)
			break;
	WAIT_FOR(atomic_load(&opens) == 0);
	CHECK_EQ(server_stats().protocol_errors, 1);
	close(fd);
	tear_down();
}

/* A client that takes an answer slowly has all the time for each next byte. */
BETWEEN_TEST(test_slow_reader_is_served_to_the_end, set_up(2000, 0), tear_down())
{
	static char data[BLOCK_MAX / 16];
	const int small = 16384;
	int fd = dial_buffered(port, 4096), other = open_export(port, "");

	CHECK_EQ(try_open(fd, ""), 0);
	/* So that nearly all of the answer waits in the server. */
	CHECK_EQ(setsockopt(atomic_load(&last_conn)->fd, SOL_SOCKET, SO_SNDBUF, &small,
			    sizeof(small)),
		 0);
	CHECK(say_request(fd, NBD_CMD_READ, 0, 7, 0, BLOCK_MAX));
	CHECK_EQ(hear_reply(fd, 7, NULL, 0), 0);
	/* All of it takes longer than the server waits for a client. */
	for (unsigned i = 0; i < 16; i++) {
		sleep_ms(200);
		CHECK_EQ(atomic_load(&holds), 1);
		CHECK(hear(fd, data, sizeof(data)));
		check_served(other);
	}
	CHECK_EQ(do_command(fd, NBD_CMD_FLUSH, 0, 0, 0), 0);
	close(fd);
	close(other);
}

/* ---- clients that ask for much */

enum { ZEROES, PAGES, LARGE_READS, GREEDS };

static const struct {
	uint32_t count;
	uint16_t command;
	uint32_t length;
	unsigned before; /* requests that its first two turns serve at most */
} greeds[GREEDS] = {
	{64, NBD_CMD_WRITE_ZEROES, 2 * MIB, 2},
	{1024, NBD_CMD_READ, 512, 2 * BATCH_REPLIES},
	{16, NBD_CMD_READ, MIB, 2},
};

static void *reader_main(void *opaque)
{
	hear_close((int)(intptr_t)opaque);
	return NULL;
}

/* While one client's first request is being served another asks: it has its turn soon. */
TEST_CASES(test_greedy_clients_share, GREEDS, n)
{
	static unsigned char wire[1024 * NBD_REQUEST_BYTES];
	struct nbd_request request = {.command = greeds[n].command, .length = greeds[n].length};
	struct pollfd asked = {.events = POLLIN};
	const uint64_t mark = BAD_FROM - 512;
	pthread_t reader;
	char page[512];
	int greedy, fd;

	set_up(PATIENT, 0);
	greedy = open_export(port, "");
	fd = open_export(port, "");
	CHECK_EQ(do_read(fd, 0, page, sizeof(page)), 0); /* the worker has it */
	atomic_store(&gate.count, 0);
	for (unsigned i = 0; i < greeds[n].count; i++)
		nbd_put_request(wire + (size_t)i * NBD_REQUEST_BYTES, &request);
	CHECK_EQ(pthread_create(&reader, NULL, reader_main, (void *)(intptr_t)greedy), 0);
	gate_close();
	CHECK(say(greedy, wire, (size_t)greeds[n].count * NBD_REQUEST_BYTES));
	gate_await();
	CHECK(say_request(fd, NBD_CMD_READ, 0, 5, mark, sizeof(page)));
	asked.fd = atomic_load(&last_conn)->fd;
	CHECK_EQ(poll(&asked, 1, PATIENT), 1);
	gate_open();
	CHECK_EQ(hear_reply(fd, 5, page, sizeof(page)), 0);
	CHECK(holds_before(mark) <= greeds[n].before);
	WAIT_FOR(atomic_load(&gate.count) == greeds[n].count + 1);
	shutdown(greedy, SHUT_WR);
	pthread_join(reader, NULL);
	close(greedy);
	close(fd);
	tear_down();
}

/* ---- connections that are shut down */

/* What was received before is not served after. */
WORKER_TEST(test_nothing_is_served_after_shutdown)
{
	unsigned char wire[2 * NBD_REQUEST_BYTES];
	struct nbd_request request = {.command = NBD_CMD_READ, .length = 512};
	int other = open_export(port, ""), fd = open_export(port, "");
	struct iswi_nbd_conn *conn = last_conn;

	fill_bytes(other, 0, 7, 4096);
	nbd_put_request(wire, &request);
	request = (struct nbd_request){.command = NBD_CMD_TRIM, .length = 4096};
	nbd_put_request(wire + NBD_REQUEST_BYTES, &request);
	gate_close();
	CHECK(say(fd, wire, sizeof(wire)));
	gate_await();
	shut_down(conn);
	gate_open();
	WAIT_FOR(atomic_load(&opens) == 1);
	check_bytes(other, 0, 7, 4096);
	close(fd);
	close(other);
}

/* Whoever waits for the connection's end does not wait for gigabytes of zeroes. */
WORKER_TEST(test_zeroing_ends_with_its_connection)
{
	int other = open_export(port, ""), fd = open_export(port, "");
	struct iswi_nbd_conn *conn = last_conn;

	fill_bytes(other, 2 * MIB, 7, MIB);
	gate_close();
	CHECK(say_request(fd, NBD_CMD_WRITE_ZEROES, 0, 1, 0, BAD_FROM));
	gate_await();
	shut_down(conn);
	gate_open();
	WAIT_FOR(atomic_load(&opens) == 1);
	CHECK_EQ(atomic_load(&holds), 0);
	check_bytes(other, 2 * MIB, 7, MIB);
	close(fd);
	close(other);
}

/* Whatever a client has left undone, its memory is free at once. */
TEST_CASES(test_stalled_connections_are_shut_down, STALLS, how)
{
	int other, fd;

	set_up(PATIENT, 0);
	other = open_export(port, "");
	fd = stall(how);
	shut_down(last_conn);
	WAIT_FOR(atomic_load(&opens) == 1);
	CHECK_EQ(atomic_load(&holds), 0);
	check_served(other);
	close(fd);
	close(other);
	tear_down();
}

/* In the middle of everything, and of handshakes. */
TEST_CASES(test_server_ends_with_stalled_clients, 10, round)
{
	int fds[STALLS], greeted, silent;

	set_up(PATIENT, round % 2);
	silent = dial(port);
	greeted = dial(port);
	greet(greeted, NBD_FLAG_FIXED_NEWSTYLE);
	for (unsigned how = 0; how < STALLS; how++)
		fds[how] = stall(how);
	tear_down();
	for (unsigned how = 0; how < STALLS; how++)
		await_close(fds[how]);
	await_close(greeted);
	await_close(silent);
}

/* A process that is being started has a copy of each descriptor for a moment. */
WORKER_TEST(test_copy_of_an_ended_connection)
{
	int other = open_export(port, ""), fd = open_export(port, ""),
	    copy = dup(atomic_load(&last_conn)->fd);

	CHECK(copy >= 0);
	check_served(fd);
	close(fd);
	WAIT_FOR(server_stats().connections == 1);
	/* The copy's socket would be ready all the time. */
	check_served(other);
	close(copy);
	close(other);
}

/* ---- threads of their own */

static bool has_worker(const struct iswi_nbd_conn *conn)
{
	bool has;

	pthread_mutex_lock(&server->hand_lock);
	has = conn->worker != NULL;
	pthread_mutex_unlock(&server->hand_lock);
	return has;
}

/* The first keeps its thread, until a second comes: then one worker has both. */
TEST_CASES(test_lone_connection_keeps_its_thread, 2, writes)
{
	struct iswi_nbd_conn *first, *second;
	int fds[2];

	set_up(PATIENT, 1);
	fds[0] = open_export(port, "");
	first = last_conn;
	for (unsigned i = 0; i < 50; i++)
		check_served(fds[0]);
	CHECK(!has_worker(first));
	fds[1] = open_export(port, "");
	second = last_conn;
	WAIT_FOR(has_worker(second));
	/* It is handed over wherever it is, and loses nothing. */
	for (unsigned i = 0; i < 200 && !has_worker(first); i++)
		if (writes)
			fill_bytes(fds[0], 2 * MIB, 5, MIB / 8);
		else
			check_served(fds[0]);
	CHECK(has_worker(first));
	for (unsigned i = 0; i < 2; i++) {
		check_served(fds[i]);
		close(fds[i]);
	}
	tear_down();
}

/* An idle one is handed over too: no thread stays because its client has nothing to ask for. */
BETWEEN_TEST(test_idle_connection_is_handed_over, set_up(500, 1), tear_down())
{
	int fds[2];
	struct iswi_nbd_conn *first;

	fds[0] = open_export(port, "");
	first = last_conn;
	fds[1] = open_export(port, "");
	WAIT_FOR(has_worker(first));
	check_served(fds[0]);
	check_served(fds[1]);
	close(fds[0]);
	close(fds[1]);
}

/* ---- set-up */

/* An event to end the workers, and a set: each is missing once. */
TEST_CASES(test_no_descriptors_for_workers, 2, had)
{
	const struct iswi_nbd_server_config config = config_of(PATIENT, 0);
	struct rlimit before, limit;
	struct isw_error error;
	int lowest = dup(0);

	CHECK(lowest >= 0);
	close(lowest);
	CHECK_EQ(iswi_nbd_server_create(&config, &server, NULL), 0);
	CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
	/* One is the server's already. */
	limit = (struct rlimit){.rlim_cur = (rlim_t)lowest + 1 + had, .rlim_max = before.rlim_max};
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
	CHECK_EQ(iswi_nbd_server_listen_tcp(server, "127.0.0.1", 0, &port, &error), -EMFILE);
	check_says(error.text, "the threads that serve connections could not be started");
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
	CHECK_EQ(iswi_nbd_server_listen_tcp(server, "127.0.0.1", 0, &port, &error), 0);
	tear_down();
	CHECK_EQ(dup(0), lowest);
	close(lowest);
}

int main(void)
{
	cpu_set_t set;
	int cpu = 0;

	CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
	while (!CPU_ISSET(cpu, &set))
		cpu++;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	CHECK_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
	CHECK_EQ(sem_init(&gate.waits, 0, 0), 0);
	CHECK_EQ(sem_init(&gate.through, 0, 0), 0);
	return run_tests();
}
