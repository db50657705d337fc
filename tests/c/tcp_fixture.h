/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For the tests of the TCP transport: a server thread that runs a script on raw sockets (so it can
 * lie), and operations that check the promises of transport.h for every transfer: ended exactly
 * once, and not with an error of the queue's before the down callback ran.
 */
#ifndef ISW_TEST_TCP_FIXTURE_H
#define ISW_TEST_TCP_FIXTURE_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "nbd_fixture.h"
#include "transport/tcp.h"
#include "util/util.h"
#include "wire/nbd.h"

#define UNUSED       __attribute__((unused))
#define EXPORT_BYTES (16u << 20)
#define TICKET       "0123456789abcdef0123456789abcdef"

/* ---------------------------------------------------------------- the client's side */

struct client {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	/* Under lock. */
	int downs;
	int down_error;
	bool down_returned;
	uint32_t ended;

	struct iswi_queue *queue;
};

struct op {
	struct iswi_xfer xfer;
	struct client *client;
	int error;
	uint32_t ended; /* times */
	void (*then)(struct op *op);
};

static UNUSED void client_down(void *ctx, int error)
{
	struct client *client = ctx;

	CHECK(error < 0);
	pthread_mutex_lock(&client->lock);
	CHECK_EQ(client->downs, 0);
	client->downs++;
	client->down_error = error;
	pthread_cond_broadcast(&client->changed);
	pthread_mutex_unlock(&client->lock);
	/* Long enough for others to submit in between: nothing may end before we return. */
	usleep(1000);
	pthread_mutex_lock(&client->lock);
	client->down_returned = true;
	pthread_mutex_unlock(&client->lock);
}

static UNUSED void op_done(struct iswi_xfer *xfer, int error)
{
	struct op *op = ISWI_CONTAINER(xfer, struct op, xfer);
	struct client *client = op->client;
	void (*then)(struct op *) = op->then;

	pthread_mutex_lock(&client->lock);
	CHECK_EQ(op->ended, 0);
	op->ended++;
	op->error = error;
	if (error == -ESHUTDOWN || error == -ECONNRESET || error == -ETIMEDOUT || error == -EPROTO)
		CHECK(client->down_returned);
	client->ended++;
	pthread_cond_broadcast(&client->changed);
	pthread_mutex_unlock(&client->lock);
	if (then != NULL)
		then(op);
}

static UNUSED void client_init(struct client *client)
{
	memset(client, 0, sizeof(*client));
	pthread_mutex_init(&client->lock, NULL);
	pthread_cond_init(&client->changed, NULL);
}

static UNUSED void op_init(struct op *op, struct client *client, enum iswi_xfer_kind kind,
			   uint64_t offset, void *buf, uint32_t length)
{
	memset(op, 0, sizeof(*op));
	op->client = client;
	op->xfer.kind = kind;
	op->xfer.offset = offset;
	op->xfer.buf = buf;
	op->xfer.length = length;
	op->xfer.done = op_done;
}

static UNUSED void op_submit(struct op *op)
{
	op->xfer.next = NULL;
	op->client->queue->ops->submit(op->client->queue, &op->xfer);
}

static UNUSED void op_start(struct op *op, struct client *client, enum iswi_xfer_kind kind,
			    uint64_t offset, void *buf, uint32_t length)
{
	op_init(op, client, kind, offset, buf, length);
	op_submit(op);
}

/* As one batch. */
static UNUSED void ops_submit(struct op *ops, uint32_t count)
{
	struct iswi_queue *queue = ops[0].client->queue;

	for (uint32_t i = 0; i < count; i++)
		ops[i].xfer.next = i + 1 < count ? &ops[i + 1].xfer : NULL;
	queue->ops->submit(queue, &ops[0].xfer);
}

/* Waits until *value, changed under the client's lock, is at least want. */
static UNUSED void client_wait(struct client *client, const uint32_t *value, uint32_t want)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += WAIT_S;
	pthread_mutex_lock(&client->lock);
	while (*value < want)
		CHECK_EQ(pthread_cond_timedwait(&client->changed, &client->lock, &until), 0);
	pthread_mutex_unlock(&client->lock);
}

static UNUSED void client_wait_ended(struct client *client, uint32_t want)
{
	client_wait(client, &client->ended, want);
}

/* All of them end with that error. */
static UNUSED void ops_await(const struct op *ops, uint32_t count, int error)
{
	for (uint32_t i = 0; i < count; i++) {
		client_wait(ops[i].client, &ops[i].ended, 1);
		CHECK_EQ(ops[i].error, error);
	}
}

static UNUSED int client_wait_down(struct client *client)
{
	int error;

	client_wait(client, (const uint32_t *)&client->downs, 1);
	pthread_mutex_lock(&client->lock);
	error = client->down_error;
	pthread_mutex_unlock(&client->lock);
	return error;
}

static UNUSED int op_run(struct op *op)
{
	op_submit(op);
	client_wait(op->client, &op->ended, 1);
	return op->error;
}

static UNUSED void client_shutdown(struct client *client)
{
	client->queue->ops->shutdown(client->queue);
}

static UNUSED struct iswi_tcp_config client_config(uint16_t port)
{
	return (struct iswi_tcp_config){
		.host = "127.0.0.1",
		.port = port,
		.export_name = TICKET,
		.export_bytes_min = EXPORT_BYTES,
		.transfer_bytes_max = 1u << 20,
		.depth = 16,
		.connect_ms_max = WAIT_S * 1000,
		.request_ms_max = WAIT_S * 1000,
		.thread_name = "isw-test",
	};
}

static UNUSED void client_connect(struct client *client, const struct iswi_tcp_config *config)
{
	struct iswi_queue_events events = {.down = client_down, .ctx = client};
	struct isw_error error = {0};

	client_init(client);
	if (iswi_tcp_connect(config, &events, &client->queue, &error) != 0) {
		fprintf(stderr, "connect: %s\n", error.text);
		exit(1);
	}
}

/* After it every transfer was ended and down was called. */
static UNUSED void client_destroy(struct client *client)
{
	client->queue->ops->destroy(client->queue);
	CHECK_EQ(client->downs, 1);
	CHECK(client->down_returned);
	pthread_mutex_destroy(&client->lock);
	pthread_cond_destroy(&client->changed);
}

/* ---------------------------------------------------------------- the server's side */

struct server {
	int listen_fd;
	uint16_t port;
	pthread_t thread;
	void (*script)(int fd, void *arg);
	void *arg;
};

static UNUSED void *server_main(void *opaque)
{
	struct server *server = opaque;
	int one = 1;
	int fd = accept(server->listen_fd, NULL, NULL);

	if (fd >= 0) {
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		server->script(fd, server->arg);
		close(fd);
	}
	return NULL;
}

/* Listens on a free loopback port; no thread yet. */
static UNUSED void server_listen(struct server *server, int family)
{
	struct sockaddr_in in = {.sin_family = AF_INET};
	struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	socklen_t length = family == AF_INET ? sizeof(in) : sizeof(in6);
	struct sockaddr *address =
		family == AF_INET ? (struct sockaddr *)&in : (struct sockaddr *)&in6;

	in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	server->listen_fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(server->listen_fd >= 0);
	if (bind(server->listen_fd, address, length) < 0 && family == AF_INET6)
		SKIP("no IPv6 loopback");
	CHECK_EQ(listen(server->listen_fd, 16), 0);
	CHECK_EQ(getsockname(server->listen_fd, address, &length), 0);
	server->port = ntohs(family == AF_INET ? in.sin_port : in6.sin6_port);
}

/* One connection, served by script, which need not close it. */
static UNUSED void server_start(struct server *server, void (*script)(int fd, void *arg), void *arg)
{
	server_listen(server, AF_INET);
	server->script = script;
	server->arg = arg;
	CHECK_EQ(pthread_create(&server->thread, NULL, server_main, server), 0);
}

static UNUSED void server_join(struct server *server)
{
	shutdown(server->listen_fd, SHUT_RDWR);
	CHECK_EQ(pthread_join(server->thread, NULL), 0);
	close(server->listen_fd);
}

/* A server with that script, and how to connect to it. */
static UNUSED struct iswi_tcp_config server_config(struct server *server,
						   void (*script)(int fd, void *arg), void *arg)
{
	server_start(server, script, arg);
	return client_config(server->port);
}

/* A server with that script and a client of it; depth 0: that of client_config. */
static UNUSED void both_start(struct server *server, struct client *client,
			      void (*script)(int fd, void *arg), void *arg, uint32_t depth)
{
	struct iswi_tcp_config config = server_config(server, script, arg);

	config.depth = depth != 0 ? depth : config.depth;
	client_connect(client, &config);
}

static UNUSED void both_end(struct server *server, struct client *client)
{
	client_destroy(client);
	server_join(server);
}

static UNUSED bool server_greet(int fd)
{
	uint8_t greeting[NBD_GREETING_BYTES];
	uint8_t flags[4];

	nbd_put64(greeting, NBD_MAGIC);
	nbd_put64(greeting + 8, NBD_OPTION_MAGIC);
	nbd_put16(greeting + 16, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	return say(fd, greeting, sizeof(greeting)) && hear(fd, flags, sizeof(flags));
}

/* Takes the GO option with the name that TICKET is. */
static UNUSED bool server_take_go(int fd)
{
	uint8_t bytes[NBD_OPTION_HEADER_BYTES + 4 + sizeof(TICKET) - 1 + 4];

	if (!hear(fd, bytes, sizeof(bytes)))
		return false;
	CHECK_EQ(nbd_get64(bytes), NBD_OPTION_MAGIC);
	CHECK_EQ(nbd_get32(bytes + 8), NBD_OPT_GO);
	CHECK_EQ(nbd_get32(bytes + 12), sizeof(bytes) - NBD_OPTION_HEADER_BYTES);
	CHECK(memcmp(bytes + NBD_OPTION_HEADER_BYTES + 4, TICKET, sizeof(TICKET) - 1) == 0);
	return true;
}

static UNUSED bool server_option_reply(int fd, uint32_t type, const void *data, uint32_t length)
{
	uint8_t header[NBD_OPTION_REPLY_BYTES];

	nbd_put_option_reply(header, NBD_OPT_GO, type, length);
	return say(fd, header, sizeof(header)) && say(fd, data, length);
}

static UNUSED bool server_info_export(int fd, uint64_t bytes, uint16_t flags)
{
	uint8_t info[NBD_INFO_EXPORT_BYTES];

	nbd_put16(info, NBD_INFO_EXPORT);
	nbd_put64(info + 2, bytes);
	nbd_put16(info + 10, flags);
	return server_option_reply(fd, NBD_REP_INFO, info, sizeof(info));
}

static UNUSED bool server_info_blocks(int fd, uint32_t min, uint32_t max)
{
	uint8_t info[NBD_INFO_BLOCK_SIZE_BYTES];

	nbd_put16(info, NBD_INFO_BLOCK_SIZE);
	nbd_put32(info + 2, min);
	nbd_put32(info + 6, ISW_PAGE_BYTES);
	nbd_put32(info + 10, max);
	return server_option_reply(fd, NBD_REP_INFO, info, sizeof(info));
}

/* An honest handshake; the lies come later. */
static UNUSED bool server_handshake(int fd)
{
	return server_greet(fd) && server_take_go(fd) &&
	       server_info_export(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS) &&
	       server_info_blocks(fd, 1, 4u << 20) && server_option_reply(fd, NBD_REP_ACK, NULL, 0);
}

/* A request's header. False: the client has gone, or said goodbye. */
static UNUSED bool server_request(int fd, struct nbd_request *request)
{
	uint8_t header[NBD_REQUEST_BYTES];

	if (!hear(fd, header, sizeof(header)))
		return false;
	CHECK_EQ(nbd_get_request(header, request), 0);
	return request->command != NBD_CMD_DISC;
}

static UNUSED bool server_reply(int fd, uint64_t cookie, uint32_t error)
{
	uint8_t header[NBD_SIMPLE_REPLY_BYTES];

	nbd_put_simple_reply(header, &(struct nbd_simple_reply){error, cookie});
	return say(fd, header, sizeof(header));
}

/* An honest server over memory of EXPORT_BYTES at arg, one request after the other. */
static UNUSED void server_memory(int fd, void *arg)
{
	char *memory = arg;
	struct nbd_request request;

	if (!server_handshake(fd))
		return;
	while (server_request(fd, &request)) {
		CHECK(request.offset + request.length <= EXPORT_BYTES);
		if (request.command == NBD_CMD_WRITE &&
		    !hear(fd, memory + request.offset, request.length))
			return;
		if (!server_reply(fd, request.cookie, 0))
			return;
		if (request.command == NBD_CMD_READ &&
		    !say(fd, memory + request.offset, request.length))
			return;
	}
}

#endif
