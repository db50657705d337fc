// SPDX-License-Identifier: Apache-2.0
/* Many requests, many threads, a full socket, and ends at the worst moment. */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "tests_between.h"

#define THREADS       4
#define OPS_PER       2000 /* transfers of each thread */
#define WINDOW        24   /* of them under way at once */
#define PAGES_PER     (EXPORT_BYTES / ISW_PAGE_BYTES / THREADS)
#define BIG_BYTES     (1u << 20)
#define BIG_WRITES    12
#define SHUTDOWN_RUNS 30

static struct server server;
static struct client client;
static char memory[EXPORT_BYTES];

/* ---------------------------------------------------------------- pipelined, verified */

/* Batches of WINDOW, alternately written and read back: the n-th batch gets pages of its own. */
static void *worker_main(void *opaque)
{
	static const uint32_t batches = OPS_PER / WINDOW / 2;
	const uint32_t first_page = (uint32_t)(uintptr_t)opaque * PAGES_PER;
	char *buffer = malloc((size_t)WINDOW * ISW_PAGE_BYTES);
	struct op op[WINDOW];

	CHECK(buffer != NULL);
	for (uint32_t n = 0; n < 2 * batches; n++) {
		bool write = n % 2 == 0;
		uint32_t first = first_page + n / 2 * WINDOW % (PAGES_PER - WINDOW);

		for (uint32_t i = 0; i < WINDOW; i++) {
			char *page = buffer + (size_t)i * ISW_PAGE_BYTES;

			if (write)
				memset(page, (int)(n / 2 + i + first), ISW_PAGE_BYTES);
			op_init(&op[i], &client, write ? ISWI_XFER_WRITE : ISWI_XFER_READ,
				(uint64_t)(first + i) * ISW_PAGE_BYTES, page, ISW_PAGE_BYTES);
		}
		/* As one chain, or one by one. */
		if (n % 3 == 0)
			ops_submit(op, WINDOW);
		for (uint32_t i = 0; i < WINDOW && n % 3 != 0; i++)
			op_submit(&op[i]);
		ops_await(op, WINDOW, 0);
		for (uint32_t i = 0; i < WINDOW; i++) {
			char *page = buffer + (size_t)i * ISW_PAGE_BYTES;

			CHECK_EQ(op[i].ended, 1);
			for (uint32_t at = 0; at < ISW_PAGE_BYTES; at += 64)
				CHECK_EQ(page[at], (char)(n / 2 + i + first));
			if (write)
				memset(page, 0, ISW_PAGE_BYTES);
		}
	}
	free(buffer);
	return NULL;
}

TEST_CASES(check_many_threads, 2, is_narrow)
{
	both_start(&server, &client, server_memory, memory, is_narrow ? 3 : 64);
	at_once(THREADS, worker_main);
	CHECK_EQ(client.downs, 0);
	both_end(&server, &client);
}

/* ---------------------------------------------------------------- a full socket */

static atomic_bool go;

/* Reads nothing until told, so that the client's socket fills in the middle of a payload. */
static void slow_script(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (!server_handshake(fd))
		return;
	WAIT_FOR(atomic_load(&go));
	while (server_request(fd, &request)) {
		CHECK_EQ(request.command, NBD_CMD_WRITE);
		if (!hear(fd, memory + request.offset, request.length) ||
		    !server_reply(fd, request.cookie, 0))
			return;
	}
}

TEST(check_full_socket)
{
	static char data[BIG_WRITES][BIG_BYTES];
	struct op op[BIG_WRITES];

	atomic_store(&go, false);
	both_start(&server, &client, slow_script, NULL, BIG_WRITES / 2);
	for (uint32_t i = 0; i < BIG_WRITES; i++) {
		memset(data[i], (int)i + 1, BIG_BYTES);
		op_start(&op[i], &client, ISWI_XFER_WRITE, (uint64_t)i * BIG_BYTES, data[i],
			 BIG_BYTES); /* returns although nobody reads */
	}
	atomic_store(&go, true);
	ops_await(op, BIG_WRITES, 0);
	CHECK(memcmp(memory, data, sizeof(data)) == 0);
	both_end(&server, &client);
}

/* Nobody reads; the deadline or a shutdown ends what is half sent and what waits behind it. */
TEST_CASES(check_end_in_full_socket, 2, by_deadline)
{
	static char data[BIG_WRITES][BIG_BYTES];
	struct op op[BIG_WRITES];
	struct iswi_tcp_config config;
	int code = by_deadline ? -ETIMEDOUT : -ESHUTDOWN;

	atomic_store(&go, false);
	config = server_config(&server, slow_script, NULL);
	if (by_deadline)
		config.request_ms_max = 200;
	client_connect(&client, &config);
	for (uint32_t i = 0; i < BIG_WRITES; i++)
		op_start(&op[i], &client, ISWI_XFER_WRITE, 0, data[i], BIG_BYTES);
	if (!by_deadline)
		client_shutdown(&client);
	CHECK_EQ(client_wait_down(&client), code);
	ops_await(op, BIG_WRITES, code);
	client_destroy(&client);
	atomic_store(&go, true);
	server_join(&server);
}

/* ---------------------------------------------------------------- depth and order */

/* Counts the requests that stand unanswered; they must come in order and be depth at most. */
static void count_depth(int fd, void *arg)
{
	uint32_t depth = *(uint32_t *)arg;
	uint64_t cookie[64], next = 0;
	uint32_t held = 0;

	if (!server_handshake(fd))
		return;
	for (;;) {
		struct nbd_request request;
		char byte;

		/* Answers when nothing more comes: then all that may come is here. */
		while (held > 0 && (held == 64 || recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0))
			if (held == depth || usleep(2000) == 0)
				CHECK(server_reply(fd, cookie[--held], NBD_EIO));
		if (!server_request(fd, &request))
			return;
		CHECK_EQ(request.offset, next);
		next += ISW_PAGE_BYTES;
		cookie[held++] = request.cookie;
		CHECK(held <= depth);
	}
}

TEST(check_depth)
{
	static char page[ISW_PAGE_BYTES];
	static struct op op[200];
	uint32_t depth = 5;

	both_start(&server, &client, count_depth, &depth, depth);
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(op); i++) {
		op_start(&op[i], &client, ISWI_XFER_READ, (uint64_t)i * ISW_PAGE_BYTES, page,
			 sizeof(page));
	}
	client_wait_ended(&client, ISWI_ARRAY_LEN(op));
	CHECK_EQ(client.downs, 0);
	both_end(&server, &client);
}

/* ---------------------------------------------------------------- ends among submits */

static struct op storm_ops[THREADS][64];

static void *storm_main(void *opaque)
{
	static char page[THREADS][2][ISW_PAGE_BYTES]; /* written from, read into */
	const uintptr_t me = (uintptr_t)opaque;

	for (uint32_t i = 0; i < 64; i++)
		op_start(&storm_ops[me][i], &client, i % 2 ? ISWI_XFER_READ : ISWI_XFER_WRITE,
			 me * ISW_PAGE_BYTES, page[me][i % 2], ISW_PAGE_BYTES);
	return NULL;
}

/* Each transfer is ended exactly once, whenever the end comes. */
TEST_CASES(check_storm, SHUTDOWN_RUNS, run)
{
	pthread_t threads[THREADS];

	both_start(&server, &client, server_memory, memory, 1 + run % 8);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, storm_main, (void *)i), 0);
	client_wait_ended(&client, 1 + run * 7);
	client_shutdown(&client);
	for (uint32_t i = 0; i < THREADS; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	client_destroy(&client);
	CHECK_EQ(client.ended, THREADS * 64);
	for (uint32_t i = 0; i < THREADS * 64; i++) {
		const struct op *op = &storm_ops[i / 64][i % 64];

		CHECK_EQ(op->ended, 1);
		CHECK(op->error == 0 || op->error == -ESHUTDOWN);
	}
	server_join(&server);
}

/* ---------------------------------------------------------------- from inside done */

static uint32_t rounds_left;

static void again(struct op *op)
{
	if (op->error == 0 && rounds_left > 0) {
		rounds_left--;
		op->ended = 0;
		op_submit(op);
	}
}

TEST(check_submit_from_done)
{
	static char page[ISW_PAGE_BYTES];
	struct op op;

	both_start(&server, &client, server_memory, memory, 1);
	rounds_left = 500;
	op_init(&op, &client, ISWI_XFER_READ, 0, page, sizeof(page));
	op.then = again;
	op_submit(&op);
	client_wait_ended(&client, 501);
	both_end(&server, &client);
}
