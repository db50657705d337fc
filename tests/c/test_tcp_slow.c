// SPDX-License-Identifier: Apache-2.0
/*
 * READs that a stalling donor does not answer in time: the submitter is told soon, may put another
 * buffer in place, and then nothing touches the first one any more.
 */
#include <dirent.h>

#include "tcp_fixture.h"
#include "tests_between.h"

#define SLOW_US  20000
#define AGAIN_US 1000000
#define LENGTH   (16u * ISW_PAGE_BYTES)
#define OLD      0x11
#define NEW      0x22
#define DATA     0x33

struct read {
	struct op op; /* first */
	char *swap;   /* the buffer to be put in place, or NULL */
	bool drop;    /* no buffer is put in place */
	bool again;   /* it is told a second time */
	/* Under the client's lock. */
	uint32_t slow;
	uint32_t received;
	uint64_t slow_ns; /* after submit */
};

static struct server server;
static struct client client;
static char old_bytes[4][LENGTH], new_bytes[4][LENGTH];
static atomic_bool gate_open;

/* Answers reads with DATA, `ahead` bytes of the payload before the gate opens (-1: nothing). */
static void stalling_server(int fd, void *arg)
{
	static char data[LENGTH];
	int ahead = *(int *)arg;
	struct nbd_request request;

	memset(data, DATA, sizeof(data));
	if (!server_handshake(fd))
		return;
	while (server_request(fd, &request)) {
		CHECK(request.length <= LENGTH);
		if (ahead < 0)
			WAIT_FOR(atomic_load(&gate_open));
		if (!server_reply(fd, request.cookie, 0))
			return;
		if (ahead >= 0) {
			if (!say(fd, data, (size_t)ahead))
				return;
			WAIT_FOR(atomic_load(&gate_open));
		}
		if (!say(fd, data, request.length - (size_t)ISWI_MAX(ahead, 0)))
			return;
	}
}

static void read_slow(struct iswi_xfer *xfer, uint32_t received)
{
	struct read *read = ISWI_CONTAINER(xfer, struct read, op.xfer);
	struct client *client = read->op.client;

	if (read->swap != NULL) {
		memcpy(read->swap, xfer->buf, received);
		xfer->buf = read->swap;
	}
	if (read->drop)
		xfer->buf = NULL;
	if (read->again)
		xfer->slow_us = AGAIN_US;
	read->again = false;
	pthread_mutex_lock(&client->lock);
	read->slow++;
	read->received = received;
	read->slow_ns = iswi_now_ns() - xfer->submitted_ns;
	pthread_cond_broadcast(&client->changed);
	pthread_mutex_unlock(&client->lock);
}

static void read_make(struct read *read, uint32_t number, uint32_t slow_us, bool swap)
{
	memset(read, 0, sizeof(*read));
	memset(old_bytes[number], OLD, LENGTH);
	memset(new_bytes[number], NEW, LENGTH);
	op_init(&read->op, &client, ISWI_XFER_READ, 0, old_bytes[number], LENGTH);
	read->op.xfer.slow = read_slow;
	read->op.xfer.slow_us = slow_us;
	read->swap = swap ? new_bytes[number] : NULL;
}

static void read_start(struct read *read, uint32_t number, uint32_t slow_us, bool swap)
{
	read_make(read, number, slow_us, swap);
	op_submit(&read->op);
}

static void holds(const char *bytes, size_t from, size_t to, int value)
{
	CHECK(all_bytes(bytes + from, (unsigned char)value, to - from));
}

static void start(int *ahead, uint32_t depth)
{
	atomic_store(&gate_open, false);
	both_start(&server, &client, stalling_server, ahead, depth);
}

static void end(void)
{
	atomic_store(&gate_open, true);
	both_end(&server, &client);
}

/* Late answers go to the new buffers; also that of a READ which is queued and not sent. */
TEST_CASES(check_swapped, 2, one_at_a_time)
{
	int ahead = -1;
	struct read read[3];

	start(&ahead, one_at_a_time ? 1 : 16);
	for (uint32_t i = 0; i < 3; i++)
		read_start(&read[i], i, SLOW_US, i != 1);
	for (uint32_t i = 0; i < 3; i++) {
		client_wait(&client, &read[i].slow, 1);
		CHECK(read[i].slow_ns >= SLOW_US * 1000ull);
		CHECK_EQ(read[i].received, 0);
	}
	/* Somebody else's by now. */
	memset(old_bytes[0], OLD + 1, LENGTH);
	memset(old_bytes[2], OLD + 1, LENGTH);
	atomic_store(&gate_open, true);
	for (uint32_t i = 0; i < 3; i++) {
		ops_await(&read[i].op, 1, 0);
		CHECK_EQ(read[i].slow, 1);
		holds(old_bytes[i], 0, LENGTH, i == 1 ? DATA : OLD + 1);
		holds(new_bytes[i], 0, LENGTH, i == 1 ? NEW : DATA);
	}
	end();
}

/* The connection stalls in the middle of a payload. */
TEST_CASES(check_half_received, 3, n)
{
	int ahead = (int[]){5000, 40000, 0}[n];
	struct read read;

	start(&ahead, 16);
	read_start(&read, 0, SLOW_US, true);
	client_wait(&client, &read.slow, 1);
	CHECK_EQ(read.received, ahead);
	holds(new_bytes[0], 0, (size_t)ahead, DATA);
	holds(new_bytes[0], (size_t)ahead, LENGTH, NEW);
	memset(old_bytes[0], OLD + 1, LENGTH);
	atomic_store(&gate_open, true);
	ops_await(&read.op, 1, 0);
	holds(new_bytes[0], 0, LENGTH, DATA);
	holds(old_bytes[0], 0, LENGTH, OLD + 1);
	end();
}

/* What arrives for a READ without a buffer is dropped, and the next one gets its own bytes. */
TEST_CASES(check_dropped, 4, n)
{
	int ahead = (int[]){-1, 5000, 40000, 0}[n];
	struct read read, next;

	start(&ahead, 16);
	read_make(&read, 0, SLOW_US, false);
	read.drop = true;
	op_submit(&read.op);
	client_wait(&client, &read.slow, 1);
	memset(old_bytes[0], OLD + 1, LENGTH);
	read_start(&next, 1, 0, false);
	atomic_store(&gate_open, true);
	ops_await(&read.op, 1, 0);
	ops_await(&next.op, 1, 0);
	holds(old_bytes[0], 0, LENGTH, OLD + 1);
	holds(old_bytes[1], 0, LENGTH, DATA);
	end();
}

/* Who wants to be told again waits before others that were submitted later, and holds up none. */
TEST(check_told_again)
{
	int ahead = -1;
	struct read read[3];

	start(&ahead, 1);
	read_start(&read[0], 0, 0, false);
	read_make(&read[1], 1, SLOW_US, false);
	read[1].again = true;
	op_submit(&read[1].op);
	client_wait(&client, &read[1].slow, 1);
	read_start(&read[2], 2, SLOW_US, false);
	client_wait(&client, &read[2].slow, 1);
	CHECK(read[2].slow_ns < AGAIN_US * 1000ull / 2);
	client_wait(&client, &read[1].slow, 2);
	CHECK(read[1].slow_ns >= AGAIN_US * 1000ull);
	atomic_store(&gate_open, true);
	client_wait_ended(&client, 3);
	CHECK_EQ(read[1].slow, 2);
	CHECK_EQ(read[2].slow, 1);
	end();
}

/* Nobody asks for the time of those that do not mind, or are answered. */
TEST(check_not_told)
{
	int ahead = -1;
	struct read minds, does_not, quick;

	start(&ahead, 16);
	atomic_store(&gate_open, true);
	read_start(&quick, 0, 10000000, true);
	client_wait_ended(&client, 1);
	atomic_store(&gate_open, false);
	read_start(&does_not, 1, 0, true);
	read_start(&minds, 2, SLOW_US, true);
	client_wait(&client, &minds.slow, 1);
	atomic_store(&gate_open, true);
	client_wait_ended(&client, 3);
	CHECK_EQ(quick.slow, 0);
	CHECK_EQ(does_not.slow, 0);
	holds(old_bytes[0], 0, LENGTH, DATA);
	holds(old_bytes[1], 0, LENGTH, DATA);
	end();
}

/* Also on a connection that has been idle, whose thread sleeps for long. */
TEST(check_soon)
{
	int ahead = -1;
	uint64_t best_ns = UINT64_MAX;

	start(&ahead, 16);
	/* One is enough: a busy machine may let any of them wait, but not a hundred in a row. */
	for (uint32_t i = 0; i < 100 && best_ns >= 5 * SLOW_US * 1000ull; i++) {
		struct read read;
		uint64_t took_ns;

		usleep(300000);
		atomic_store(&gate_open, false);
		read_start(&read, 0, SLOW_US, true);
		client_wait(&client, &read.slow, 1);
		took_ns = read.slow_ns;
		atomic_store(&gate_open, true);
		client_wait_ended(&client, i + 1);
		best_ns = ISWI_MIN(best_ns, took_ns);
	}
	CHECK(best_ns < 5 * SLOW_US * 1000ull);
	end();
}

/* The receiver thread looked at the clock, and then a READ was submitted. */
static uint64_t late_now_ns(void *ctx)
{
	bool submitter = pthread_equal(pthread_self(), *(pthread_t *)ctx) != 0;

	return iswi_now_ns() - (submitter ? 0 : 1000000000ull);
}

TEST(check_younger_than_the_clock)
{
	int ahead = -1;
	pthread_t self = pthread_self();
	struct iswi_clock clock = {.now_ns = late_now_ns, .ctx = &self};
	struct iswi_tcp_config config;
	struct read read;

	atomic_store(&gate_open, false);
	config = server_config(&server, stalling_server, &ahead);
	config.clock = &clock;
	client_connect(&client, &config);
	read_start(&read, 0, SLOW_US, true);
	usleep(10 * SLOW_US);
	pthread_mutex_lock(&client.lock);
	CHECK_EQ(read.slow, 0);
	pthread_mutex_unlock(&client.lock);
	atomic_store(&gate_open, true);
	client_wait_ended(&client, 1);
	holds(old_bytes[0], 0, LENGTH, DATA);
	end();
}

/* How often the connection's thread has slept. */
static uint64_t sleeps(void)
{
	DIR *tasks = opendir("/proc/self/task");
	uint64_t count = 0;
	struct dirent *task;

	CHECK(tasks != NULL);
	while ((task = readdir(tasks)) != NULL) {
		char path[300], line[200];
		bool ours = false;
		FILE *file;

		snprintf(path, sizeof(path), "/proc/self/task/%s/status", task->d_name);
		file = fopen(path, "r");
		while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
			ours |= strcmp(line, "Name:\tisw-test\n") == 0;
			if (ours && strncmp(line, "voluntary_ctxt_switches:", 24) == 0)
				count += strtoull(line + 24, NULL, 10);
		}
		if (file != NULL)
			fclose(file);
	}
	closedir(tasks);
	return count;
}

TEST(check_idle_wakes_nobody)
{
	int ahead = 0;
	struct read read;
	uint64_t before;

	start(&ahead, 16);
	atomic_store(&gate_open, true);
	read_start(&read, 0, SLOW_US, true);
	client_wait_ended(&client, 1);
	usleep(300000);
	before = sleeps();
	CHECK(before > 0);
	usleep(700000);
	CHECK(sleeps() - before <= 2); /* a tick of 5 ms would make it 140 */
	end();
}

/* The donor never answers: the transfer ends with the connection, and only then. */
TEST(check_down)
{
	int ahead = 5000;
	struct read read[2];

	start(&ahead, 16);
	for (uint32_t i = 0; i < 2; i++)
		read_start(&read[i], i, SLOW_US, true);
	for (uint32_t i = 0; i < 2; i++)
		client_wait(&client, &read[i].slow, 1);
	CHECK_EQ(client.ended, 0);
	client_shutdown(&client);
	for (uint32_t i = 0; i < 2; i++) {
		ops_await(&read[i].op, 1, -ESHUTDOWN);
		holds(old_bytes[i], 5000, LENGTH, OLD);
	}
	end();
}
