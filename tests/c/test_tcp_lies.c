// SPDX-License-Identifier: Apache-2.0
/*
 * Replies that are errors, lies or nothing: a transfer's own failure leaves the queue up, all else
 * takes it down, first the callback, then every transfer, each exactly once.
 */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "tests_between.h"

#define OPS 8

static struct server server;
static struct client client;
static struct op op[OPS]; /* READs, until a test makes others of them */
static char page[OPS][ISW_PAGE_BYTES];
static char large[4u << 20]; /* more than the sockets' buffers take */

static void setup(void (*script)(int fd, void *arg), void *arg)
{
	both_start(&server, &client, script, arg, 0);
	for (uint32_t i = 0; i < OPS; i++) {
		memset(page[i], 0xee, ISW_PAGE_BYTES);
		op_init(&op[i], &client, ISWI_XFER_READ, i * ISW_PAGE_BYTES, page[i],
			ISW_PAGE_BYTES);
	}
}

#define ANSWERED_TEST(name, script)                                                                \
	BETWEEN_TEST(name, setup(script, NULL), both_end(&server, &client))

/* A lie about the first request: a reply, or bytes. */
struct lie {
	int code;                /* with which the queue goes down */
	uint32_t reads;          /* at once, which that ends */
	uint64_t flip, add, set; /* how the reply's cookie differs */
	uint32_t replies, error;
	const char *bytes; /* after that */
	uint32_t count;
	bool header; /* the bytes are the beginning of a reply */
	bool shut;   /* says no more then */
	bool reset;  /* says nothing at all, and resets the connection */
};

static void tell(int fd, void *arg)
{
	const struct linger linger = {.l_onoff = 1};
	const struct lie *lie = arg;
	uint8_t header[NBD_SIMPLE_REPLY_BYTES];
	struct nbd_request request;

	if (server_handshake(fd) && server_request(fd, &request)) {
		for (uint32_t i = 0; i < lie->replies; i++)
			server_reply(fd, ((request.cookie ^ lie->flip) + lie->add) | lie->set,
				     lie->error);
		nbd_put_simple_reply(header, &(struct nbd_simple_reply){0, request.cookie});
		say(fd, lie->header ? (const char *)header : lie->bytes, lie->count);
	}
	if (lie->reset) { /* the script's end closes: with this, by a reset */
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
		return;
	}
	if (lie->shut)
		shutdown(fd, SHUT_WR);
	hear_close(fd);
}

TEST_CASES(expect_down, 8, n)
{
	static const struct lie lies[] = {
		{-EPROTO, OPS - 1, .flip = 8, .replies = 1}, /* a slot never used */
		{-EPROTO, 1, .add = 1u << 16, .replies = 1}, /* its next generation */
		{-EPROTO, 1, .set = 0xffff, .replies = 1},   /* a slot beyond the table */
		/* Errors, so that no payload stands between the two. */
		{-EPROTO, 1, .replies = 2, .error = NBD_EIO},
		{-EPROTO, OPS - 1, .bytes = "sixteen bytes, or more of them", .count = 30},
		{-ECONNRESET, OPS - 1, .header = true, .count = 15, .shut = true},
		{-ECONNRESET, OPS - 1, .replies = 1, .bytes = "short", .count = 5, .shut = true},
		{-ECONNRESET, OPS - 1, .reset = true},
	};
	const struct lie *lie = &lies[n];
	struct op *late = &op[OPS - 1];

	setup(tell, (void *)(uintptr_t)lie);
	ops_submit(op, lie->reads);
	CHECK_EQ(client_wait_down(&client), lie->code);
	client_wait_ended(&client, lie->reads);
	/* Whoever comes later is told at once, inside submit, unless down is still running. */
	op_submit(late);
	if (op[lie->reads - 1].error == lie->code) {
		CHECK_EQ(late->ended, 1);
		CHECK_EQ(late->error, -ESHUTDOWN);
	}
	client_wait_ended(&client, lie->reads + 1);
	client_shutdown(&client);
	both_end(&server, &client);
	for (uint32_t i = 0; i < lie->reads; i++)
		CHECK_EQ(op[i].ended, 1);
	CHECK_EQ(client.down_error, lie->code);
}

/* The slot is in use again, but not under that cookie. */
static void reply_stale(int fd, void *arg)
{
	struct nbd_request first, second;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &first)) {
		server_reply(fd, first.cookie, NBD_EIO);
		if (server_request(fd, &second))
			server_reply(fd, first.cookie, NBD_EIO);
	}
	hear_close(fd);
}

/* ---------------------------------------------------------------- errors are not failures */

static void refuse_all(int fd, void *arg)
{
	static const uint32_t errors[] = {NBD_EPERM,  NBD_EIO,     NBD_ENOMEM,    NBD_EINVAL,
					  NBD_ENOSPC, NBD_ENOTSUP, NBD_ESHUTDOWN, 4711};
	struct nbd_request request;

	(void)arg;
	if (!server_handshake(fd))
		return;
	for (uint32_t i = 0; server_request(fd, &request); i++) {
		if (i < ISWI_ARRAY_LEN(errors)) {
			server_reply(fd, request.cookie, errors[i]);
			continue;
		}
		server_reply(fd, request.cookie, 0);
		for (int n = 0; n < ISW_PAGE_BYTES; n++)
			say(fd, "a", 1); /* payload in as many pieces as there can be */
	}
}

TEST(check_error_replies)
{
	static const int errors[] = {-EPERM,  -EIO,        -ENOMEM, -EINVAL,
				     -ENOSPC, -EOPNOTSUPP, -EIO,    -EINVAL};

	setup(refuse_all, NULL);
	for (uint32_t i = 0; i < OPS; i++)
		CHECK_EQ(op_run(&op[i]), errors[i]);
	CHECK_EQ(client.downs, 0);
	op[0].ended = 0;
	CHECK_EQ(op_run(&op[0]), 0);
	CHECK(all_bytes(page[0], 'a', ISW_PAGE_BYTES));
	both_end(&server, &client);
	CHECK_EQ(client.down_error, -ESHUTDOWN);
}

ANSWERED_TEST(check_bounds, refuse_all)
{
	op[0].xfer.offset = EXPORT_BYTES;
	op[1].xfer.offset = UINT64_MAX - ISW_PAGE_BYTES + 1;
	op[2].xfer.length = 0;
	op[3].xfer.length = (4u << 20) + ISW_PAGE_BYTES; /* more than the server takes at once */
	op[4].xfer.offset = EXPORT_BYTES - ISW_PAGE_BYTES + 1;
	ops_submit(op, 6);
	ops_await(op, 5, -EINVAL);
	ops_await(&op[5], 1, -EPERM); /* the only one that reached the server */
}

/* ---------------------------------------------------------------- order and early replies */

/* Takes OPS reads, answers the last first; the payload is the request's page number. */
static void answer_backwards(int fd, void *arg)
{
	struct nbd_request request[OPS];
	char page[ISW_PAGE_BYTES];

	(void)arg;
	if (!server_handshake(fd))
		return;
	for (uint32_t i = 0; i < OPS; i++)
		CHECK(server_request(fd, &request[i]));
	for (uint32_t i = OPS; i-- > 0;) {
		memset(page, (int)(request[i].offset / ISW_PAGE_BYTES), sizeof(page));
		server_reply(fd, request[i].cookie, 0);
		say(fd, page, sizeof(page));
	}
	hear_close(fd);
}

ANSWERED_TEST(check_any_order, answer_backwards)
{
	for (uint32_t i = 0; i < OPS; i++)
		op_submit(&op[i]);
	ops_await(op, OPS, 0);
	for (uint32_t i = 0; i < OPS; i++)
		CHECK(all_bytes(page[i], i, ISW_PAGE_BYTES));
}

/* Answers a write that is larger than the socket's buffers before it takes the payload. */
static void answer_early(int fd, void *arg)
{
	uint32_t error = *(uint32_t *)arg;
	struct nbd_request request;

	if (server_handshake(fd) && server_request(fd, &request)) {
		server_reply(fd, request.cookie, error);
		usleep(100000);
		for (uint32_t n = 0; n < request.length; n += 4096) {
			uint8_t byte;

			CHECK(hear(fd, &byte, 1));
			CHECK_EQ(byte, 'w'); /* 'x' would be a buffer given back too early */
			CHECK_EQ(recv(fd, (char[4095]){0}, 4095, MSG_WAITALL), 4095);
		}
	}
	hear_close(fd);
}

static void scribble(struct op *op)
{
	memset(op->xfer.buf, 'x', op->xfer.length);
}

static void large_write(void)
{
	memset(large, 'w', sizeof(large));
	op_init(&op[0], &client, ISWI_XFER_WRITE, 0, large, sizeof(large));
}

TEST_CASES(check_early_reply, 2, is_error)
{
	uint32_t nbd_error = is_error ? NBD_ENOSPC : 0;

	setup(answer_early, &nbd_error);
	large_write();
	op[0].then = scribble;
	CHECK_EQ(op_run(&op[0]), is_error ? -ENOSPC : 0);
	CHECK_EQ(client.downs, 0);
	both_end(&server, &client);
}

/* Two answers to a write that is not even sent. */
static void answer_early_twice(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request)) {
		server_reply(fd, request.cookie, NBD_EIO);
		server_reply(fd, request.cookie, 0);
		usleep(100000);
	}
	hear_close(fd);
}

ANSWERED_TEST(check_early_reply_twice, answer_early_twice)
{
	int error;

	large_write();
	error = op_run(&op[0]);
	/* The first answer counts when the sockets took all of the write before the second came. */
	CHECK(error == -EPROTO || error == -EIO);
	CHECK_EQ(client_wait_down(&client), -EPROTO);
}

ANSWERED_TEST(check_stale_reply, reply_stale)
{
	CHECK_EQ(op_run(&op[0]), -EIO);
	CHECK_EQ(op_run(&op[1]), -EPROTO);
}

/* ---------------------------------------------------------------- deadlines */

static atomic_bool go; /* answer now */

static void answer_late(int fd, void *arg)
{
	char page[ISW_PAGE_BYTES];
	struct nbd_request request;

	(void)arg;
	if (!server_handshake(fd) || !server_request(fd, &request))
		return;
	WAIT_FOR(atomic_load(&go));
	memset(page, 'l', sizeof(page));
	server_reply(fd, request.cookie, 0);
	say(fd, page, sizeof(page));
	hear_close(fd);
}

static uint64_t fake_now(void *ctx)
{
	return atomic_load((atomic_uint_fast64_t *)ctx);
}

/*
 * An hour passes by the queue's clock: down and ended; the answer that comes afterwards finds no
 * way into the buffer.
 */
TEST_CASES(check_deadline, 2, is_write)
{
	atomic_uint_fast64_t now_ns = 1;
	struct iswi_clock clock = {.now_ns = fake_now, .ctx = &now_ns};
	struct iswi_tcp_config config;

	atomic_store(&go, false);
	config = server_config(&server, answer_late, NULL);
	config.clock = &clock;
	config.request_ms_max = 200; /* what a receiver that was idle sleeps, by the real clock */
	client_connect(&client, &config);
	memset(page[0], 0xee, ISW_PAGE_BYTES);
	op_start(&op[0], &client, is_write ? ISWI_XFER_WRITE : ISWI_XFER_READ, 0, page[0],
		 ISW_PAGE_BYTES);
	atomic_store(&now_ns, 3600 * 1000000000ull);
	CHECK_EQ(client_wait_down(&client), -ETIMEDOUT);
	ops_await(op, 1, -ETIMEDOUT);
	atomic_store(&go, true);
	both_end(&server, &client);
	CHECK(all_bytes(page[0], 0xee, ISW_PAGE_BYTES));
}
