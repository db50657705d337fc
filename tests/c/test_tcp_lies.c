// SPDX-License-Identifier: Apache-2.0
/*
 * Replies that are errors, lies or nothing: a transfer's own failure leaves the queue up, all else
 * takes it down, first the callback, then every transfer, each exactly once.
 */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"

#define OPS 8

struct setup {
	struct server server;
	struct client client;
	struct op op[OPS];
	char page[OPS][ISW_PAGE_BYTES];
};

static void setup_start(struct setup *setup, void (*script)(int fd, void *arg), void *arg)
{
	struct iswi_tcp_config config;

	server_start(&setup->server, script, arg);
	config = client_config(setup->server.port);
	client_connect(&setup->client, &config);
	for (uint32_t i = 0; i < OPS; i++) {
		memset(setup->page[i], 0xee, ISW_PAGE_BYTES);
		op_init(&setup->op[i], &setup->client, ISWI_XFER_READ, i * ISW_PAGE_BYTES,
			setup->page[i], ISW_PAGE_BYTES);
	}
}

static void setup_end(struct setup *setup)
{
	client_destroy(&setup->client);
	server_join(&setup->server);
}

/* count reads at once; the script must take the queue down with code, which ends them all. */
static void expect_down(void (*script)(int fd, void *arg), uint32_t count, int code)
{
	static struct setup setup;
	struct iswi_queue *queue;

	setup_start(&setup, script, NULL);
	queue = setup.client.queue;
	for (uint32_t i = 0; i + 1 < count; i++)
		setup.op[i].xfer.next = &setup.op[i + 1].xfer;
	queue->ops->submit(queue, &setup.op[0].xfer);
	CHECK_EQ(client_wait_down(&setup.client), code);
	client_wait_ended(&setup.client, count);
	/* Whoever comes later is told at once, inside submit, unless down is still running. */
	op_submit(&setup.op[OPS - 1]);
	if (setup.op[count - 1].error == code) {
		CHECK_EQ(setup.op[OPS - 1].ended, 1);
		CHECK_EQ(setup.op[OPS - 1].error, -ESHUTDOWN);
	}
	client_wait_ended(&setup.client, count + 1);
	queue->ops->shutdown(queue);
	setup_end(&setup);
	for (uint32_t i = 0; i < count; i++)
		CHECK_EQ(setup.op[i].ended, 1);
	CHECK_EQ(setup.client.down_error, code);
}

static void unknown_cookie(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request))
		server_reply(fd, request.cookie ^ 8, 0); /* a slot never used */
	server_drain(fd);
}

static void future_generation(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request))
		server_reply(fd, request.cookie + (1u << 16), 0);
	server_drain(fd);
}

static void cookie_out_of_table(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request))
		server_reply(fd, request.cookie | 0xffff, 0);
	server_drain(fd);
}

/* An error first, so that no payload stands between the two. */
static void reply_twice(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request)) {
		server_reply(fd, request.cookie, NBD_EIO);
		server_reply(fd, request.cookie, NBD_EIO);
	}
	server_drain(fd);
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
	server_drain(fd);
}

static void wrong_magic(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request))
		server_put(fd, "sixteen bytes, or more of them", 30);
	server_drain(fd);
}

static void short_header(int fd, void *arg)
{
	struct nbd_request request;
	uint8_t bytes[NBD_SIMPLE_REPLY_BYTES];

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request)) {
		nbd_put_simple_reply(bytes, &(struct nbd_simple_reply){0, request.cookie});
		server_put(fd, bytes, 15);
	}
	shutdown(fd, SHUT_WR);
	server_drain(fd);
}

static void short_payload(int fd, void *arg)
{
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd) && server_request(fd, &request)) {
		server_reply(fd, request.cookie, 0);
		server_put(fd, "short", 5);
	}
	shutdown(fd, SHUT_WR);
	server_drain(fd);
}

static void reset(int fd, void *arg)
{
	struct linger linger = {.l_onoff = 1};
	struct nbd_request request;

	(void)arg;
	if (server_handshake(fd))
		server_request(fd, &request);
	/* The script's end closes: with this, by a reset. */
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
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
			server_put(fd, "a", 1); /* payload in as many pieces as there can be */
	}
}

static void check_error_replies(void)
{
	static const int errors[] = {-EPERM,  -EIO,        -ENOMEM, -EINVAL,
				     -ENOSPC, -EOPNOTSUPP, -EIO,    -EINVAL};
	static struct setup setup;

	setup_start(&setup, refuse_all, NULL);
	for (uint32_t i = 0; i < OPS; i++)
		CHECK_EQ(op_run(&setup.op[i]), errors[i]);
	CHECK_EQ(setup.client.downs, 0);
	setup.op[0].ended = 0;
	CHECK_EQ(op_run(&setup.op[0]), 0);
	for (uint32_t i = 0; i < ISW_PAGE_BYTES; i++)
		CHECK_EQ(setup.page[0][i], 'a');
	setup_end(&setup);
	CHECK_EQ(setup.client.down_error, -ESHUTDOWN);
}

static void check_bounds(void)
{
	static struct setup setup;
	struct op *op = setup.op;

	setup_start(&setup, refuse_all, NULL);
	op[0].xfer.offset = EXPORT_BYTES;
	op[1].xfer.offset = UINT64_MAX - ISW_PAGE_BYTES + 1;
	op[2].xfer.length = 0;
	op[3].xfer.length = (4u << 20) + ISW_PAGE_BYTES; /* more than the server takes at once */
	op[4].xfer.offset = EXPORT_BYTES - ISW_PAGE_BYTES + 1;
	for (uint32_t i = 0; i < 5; i++)
		op[i].xfer.next = &op[i + 1].xfer;
	setup.client.queue->ops->submit(setup.client.queue, &op[0].xfer);
	client_wait_ended(&setup.client, 6);
	for (uint32_t i = 0; i < 5; i++)
		CHECK_EQ(op[i].error, -EINVAL);
	CHECK_EQ(op[5].error, -EPERM); /* the only one that reached the server */
	setup_end(&setup);
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
		server_put(fd, page, sizeof(page));
	}
	server_drain(fd);
}

static void check_any_order(void)
{
	static struct setup setup;

	setup_start(&setup, answer_backwards, NULL);
	for (uint32_t i = 0; i < OPS; i++)
		op_submit(&setup.op[i]);
	client_wait_ended(&setup.client, OPS);
	for (uint32_t i = 0; i < OPS; i++) {
		CHECK_EQ(setup.op[i].error, 0);
		for (uint32_t n = 0; n < ISW_PAGE_BYTES; n++)
			CHECK_EQ(setup.page[i][n], i);
	}
	setup_end(&setup);
}

/* Answers a write that is larger than the socket's buffers before it takes the payload. */
static void answer_early(int fd, void *arg)
{
	uint32_t error = *(uint32_t *)arg;
	struct nbd_request request;

	if (server_handshake(fd) && server_request(fd, &request)) {
		server_reply(fd, request.cookie, error);
		usleep(100000);
		for (uint32_t n = 0; n < request.length; n++) {
			uint8_t byte;

			if (n % 4096 != 0)
				continue;
			CHECK(server_get(fd, &byte, 1));
			CHECK_EQ(byte, 'w'); /* 'x' would be a buffer given back too early */
			CHECK_EQ(recv(fd, (char[4095]){0}, 4095, MSG_WAITALL), 4095);
		}
	}
	server_drain(fd);
}

static void scribble(struct op *op)
{
	memset(op->xfer.buf, 'x', op->xfer.length);
}

static void check_early_reply(uint32_t nbd_error, int error)
{
	static struct setup setup;
	uint32_t length = 4u << 20;
	char *data = malloc(length);

	setup_start(&setup, answer_early, &nbd_error);
	CHECK(data != NULL);
	memset(data, 'w', length);
	op_init(&setup.op[0], &setup.client, ISWI_XFER_WRITE, 0, data, length);
	setup.op[0].then = scribble;
	CHECK_EQ(op_run(&setup.op[0]), error);
	CHECK_EQ(setup.client.downs, 0);
	setup_end(&setup);
	free(data);
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
	server_drain(fd);
}

static void check_early_reply_twice(void)
{
	static struct setup setup;
	uint32_t length = 4u << 20;
	char *data = calloc(1, length);
	int error;

	setup_start(&setup, answer_early_twice, NULL);
	CHECK(data != NULL);
	op_init(&setup.op[0], &setup.client, ISWI_XFER_WRITE, 0, data, length);
	error = op_run(&setup.op[0]);
	/* The first answer counts when the sockets took all of the write before the second came. */
	CHECK(error == -EPROTO || error == -EIO);
	CHECK_EQ(client_wait_down(&setup.client), -EPROTO);
	setup_end(&setup);
	free(data);
}

static void check_stale_reply(void)
{
	static struct setup setup;

	setup_start(&setup, reply_stale, NULL);
	CHECK_EQ(op_run(&setup.op[0]), -EIO);
	CHECK_EQ(op_run(&setup.op[1]), -EPROTO);
	setup_end(&setup);
}

/* ---------------------------------------------------------------- deadlines */

struct silent {
	int go[2]; /* a byte through it: answer now */
	struct nbd_request request;
};

static void answer_late(int fd, void *arg)
{
	struct silent *silent = arg;
	char page[ISW_PAGE_BYTES];
	char byte;

	if (!server_handshake(fd) || !server_request(fd, &silent->request))
		return;
	CHECK_EQ(read(silent->go[0], &byte, 1), 1);
	memset(page, 'l', sizeof(page));
	server_reply(fd, silent->request.cookie, 0);
	server_put(fd, page, sizeof(page));
	server_drain(fd);
}

static uint64_t fake_now(void *ctx)
{
	return atomic_load((atomic_uint_fast64_t *)ctx);
}

/*
 * An hour passes by the queue's clock: down and ended; the answer that comes afterwards finds no
 * way into the buffer.
 */
static void check_deadline(enum iswi_xfer_kind kind)
{
	atomic_uint_fast64_t now_ns = 1;
	struct iswi_clock clock = {.now_ns = fake_now, .ctx = &now_ns};
	static struct setup setup;
	struct silent silent;
	struct iswi_tcp_config config;

	CHECK_EQ(pipe(silent.go), 0);
	server_start(&setup.server, answer_late, &silent);
	config = client_config(setup.server.port);
	config.clock = &clock;
	client_connect(&setup.client, &config);
	memset(setup.page[0], 0xee, ISW_PAGE_BYTES);
	op_init(&setup.op[0], &setup.client, kind, 0, setup.page[0], ISW_PAGE_BYTES);
	op_submit(&setup.op[0]);
	atomic_store(&now_ns, 3600 * 1000000000ull);
	CHECK_EQ(client_wait_down(&setup.client), -ETIMEDOUT);
	client_wait_ended(&setup.client, 1);
	CHECK_EQ(setup.op[0].error, -ETIMEDOUT);
	CHECK_EQ(write(silent.go[1], "", 1), 1);
	setup_end(&setup);
	for (uint32_t i = 0; i < ISW_PAGE_BYTES; i++)
		CHECK_EQ((uint8_t)setup.page[0][i], 0xee);
	close(silent.go[0]);
	close(silent.go[1]);
}

int main(void)
{
	check_error_replies();
	check_bounds();
	check_any_order();
	check_early_reply(0, 0);
	check_early_reply(NBD_ENOSPC, -ENOSPC);
	check_early_reply_twice();
	check_stale_reply();
	check_deadline(ISWI_XFER_READ);
	check_deadline(ISWI_XFER_WRITE);
	expect_down(unknown_cookie, OPS - 1, -EPROTO);
	expect_down(future_generation, 1, -EPROTO);
	expect_down(cookie_out_of_table, 1, -EPROTO);
	expect_down(reply_twice, 1, -EPROTO);
	expect_down(wrong_magic, OPS - 1, -EPROTO);
	expect_down(short_header, OPS - 1, -ECONNRESET);
	expect_down(short_payload, OPS - 1, -ECONNRESET);
	expect_down(reset, OPS - 1, -ECONNRESET);
	return 0;
}
