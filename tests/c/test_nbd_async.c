// SPDX-License-Identifier: Apache-2.0
/* Requests that end on other threads: order, many connections, a deaf client, an early end. */
#include "nbd_pool.h"

/*
 * The backend: requests wait in a stack until a worker takes them - the last first, so that
 * answers come out of order - or, while `hold_back` is set, until the test lets them go.
 */
static struct iswi_nbd_server *server;
static char path[64];
static char memory[EXPORT_BYTES];
static pthread_t workers[2];
/* Under the pool's lock. */
static struct iswi_nbd_request *stack;
static unsigned stacked;
static bool hold_back, ending;
static atomic_bool crowded; /* relaxed */

static int test_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		     struct iswi_nbd_export *export_out)
{
	(void)name;
	if (name_bytes != 0)
		return -ENOENT;
	pool_open(export_out);
	if (conn == NULL) /* it is only asked for */
		pool_close(ctx, export_out, conn);
	return 0;
}

static struct iswi_nbd_request *test_take(struct iswi_nbd_export *export)
{
	struct iswi_nbd_request *request;

	(void)export;
	pthread_mutex_lock(&pool.lock);
	request = pool_take();
	pthread_mutex_unlock(&pool.lock);
	return request;
}

static void test_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	(void)export;
	if (request->command == NBD_CMD_FLUSH) { /* inside submit is allowed, too */
		iswi_nbd_complete(request, 0);
		return;
	}
	pthread_mutex_lock(&pool.lock);
	request->next = stack;
	stack = request;
	stacked++;
	pthread_cond_broadcast(&pool.changed);
	pthread_mutex_unlock(&pool.lock);
}

static bool test_crowds(struct iswi_nbd_export *export)
{
	(void)export;
	return atomic_load_explicit(&crowded, memory_order_relaxed);
}

static const struct iswi_nbd_backend backend = {
	.listed = "",
	.open = test_open,
	.close = pool_close,
	.take = test_take,
	.submit = test_submit,
	.give = pool_give,
	.crowds = test_crowds,
};

/* pool.lock held, so that bytes of the same request order as their requests end. */
static int execute(const struct iswi_nbd_request *request)
{
	char *at = memory + request->offset;

	if (request->offset == EXPORT_BYTES - 4096)
		return -EIO;
	switch (request->command) {
	case NBD_CMD_READ:
		memcpy(request->data, at, request->length);
		return 0;
	case NBD_CMD_WRITE:
		memcpy(at, request->data, request->length);
		return 0;
	default:
		memset(at, 0, request->length);
		return 0;
	}
}

static void *worker(void *opaque)
{
	(void)opaque;
	pthread_mutex_lock(&pool.lock);
	while (!ending) {
		struct iswi_nbd_request *request = stack;
		int error;

		if (request == NULL || hold_back) {
			pthread_cond_wait(&pool.changed, &pool.lock);
			continue;
		}
		stack = request->next;
		stacked--;
		error = execute(request);
		pthread_mutex_unlock(&pool.lock);
		iswi_nbd_complete(request, error);
		pthread_mutex_lock(&pool.lock);
	}
	pthread_mutex_unlock(&pool.lock);
	return NULL;
}

static struct iswi_nbd_server_config config_of(uint32_t send_ms)
{
	return (struct iswi_nbd_server_config){
		.backend = &backend,
		.connections_max = 8,
		.handshake_ms_max = WAIT_S * 1000,
		.send_ms_max = send_ms,
	};
}

static void set_up(uint32_t send_ms)
{
	const struct iswi_nbd_server_config config = config_of(send_ms);

	ending = false;
	atomic_init(&crowded, false);
	snprintf(path, sizeof(path), "nbd-async-%d.sock", (int)getpid());
	pool_make();
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(workers); i++)
		CHECK_EQ(iswi_thread_start(&workers[i], "worker", worker, NULL), 0);
	CHECK_EQ(iswi_nbd_server_create(&config, &server, NULL), 0);
	CHECK_EQ(iswi_nbd_server_listen_unix(server, path, NULL), 0);
}

static void set_crowded(bool value)
{
	atomic_store_explicit(&crowded, value, memory_order_relaxed);
}

static void set_hold_back(bool value)
{
	pool_set(&hold_back, value);
}

static void tear_down(void)
{
	set_hold_back(false);
	iswi_nbd_server_destroy(server);
	CHECK_EQ(access(path, F_OK), -1);
	pool_set(&ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(workers); i++)
		pthread_join(workers[i], NULL);
	pool_free();
}

#define SERVED_TEST(name) BETWEEN_TEST(name, set_up(WAIT_S * 1000), tear_down())

static int connected(void)
{
	int fd = dial_unix(path);

	CHECK_EQ(try_open(fd, ""), 0);
	return fd;
}

SERVED_TEST(test_requests)
{
	static char out[BLOCK_MAX], in[BLOCK_MAX];
	struct iswi_nbd_server_stats stats;
	int fd = connected();

	fill_bytes(fd, 4096, 0x42, BLOCK_MAX);
	check_bytes(fd, 4096, 0x42, BLOCK_MAX);
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, 4096, 4096), 0);
	CHECK_EQ(do_command(fd, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA, 8192, 4096), 0);
	check_bytes(fd, 4096, 0, 8192);
	CHECK_EQ(do_command(fd, NBD_CMD_FLUSH, 0, 0, 0), 0);
	/* Wrong ones: refused before the backend sees them, or failed by it. */
	CHECK_EQ(do_read(fd, 512, in, 512), NBD_EINVAL);
	CHECK_EQ(do_write(fd, 512, out, 512), NBD_EINVAL);
	CHECK_EQ(do_write(fd, EXPORT_BYTES, out, 4096), NBD_ENOSPC);
	CHECK_EQ(do_read(fd, 0, in, 2 * BLOCK_MAX), NBD_EINVAL);
	CHECK_EQ(do_read(fd, EXPORT_BYTES - 4096, in, 4096), NBD_EIO);
	CHECK_EQ(do_write(fd, EXPORT_BYTES - 4096, out, 4096), NBD_EIO);
	CHECK_EQ(do_read(fd, 0, in, 4096), 0);
	WAIT_FOR(look(&pool.free_count) == REQUESTS);
	iswi_nbd_server_stats(server, &stats);
	CHECK_EQ(stats.read_requests, 3);
	CHECK_EQ(stats.write_requests, 1);
	CHECK_EQ(stats.read_bytes, BLOCK_MAX + 8192 + 4096);
	CHECK_EQ(stats.request_errors, 6);
	close(fd);
}

/*
 * Many in flight, answered in any order; each answer has its own request's bytes. Who reads what it
 * asks for is not disturbed by the question whether it crowds others out.
 */
TEST_CASES(test_out_of_order, 2, crowds)
{
	static char block[BLOCK_MAX];
	bool seen[64] = {false};
	int fd;

	set_up(WAIT_S * 1000);
	set_crowded(crowds);
	fd = connected();
	for (unsigned i = 0; i < 64; i++)
		fill_bytes(fd, i * 4096, (int)i + 1, 4096);
	for (unsigned i = 0; i < 64; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, i, i * 4096, 4096));
	for (unsigned i = 0; i < 64; i++) {
		unsigned char wire[NBD_SIMPLE_REPLY_BYTES];
		struct nbd_simple_reply reply;

		CHECK(hear(fd, wire, sizeof(wire)));
		CHECK_EQ(nbd_get_simple_reply(wire, &reply), 0);
		CHECK_EQ(reply.error, 0);
		CHECK(reply.cookie < 64 && !seen[reply.cookie]);
		seen[reply.cookie] = true;
		CHECK(hear(fd, block, 4096));
		CHECK(all_bytes(block, (unsigned char)(reply.cookie + 1), 4096));
	}
	close(fd);
	tear_down();
}

static void *hammer(void *opaque)
{
	const uint64_t base = (uintptr_t)opaque * 65536;
	int fd = connected();

	for (unsigned i = 0; i < 400; i++) {
		uint64_t offset = base + 4096 * (i % 8);

		fill_bytes(fd, offset, (int)(i % 250) + 1, 4096);
		check_bytes(fd, offset, (int)(i % 250) + 1, 4096);
	}
	close(fd);
	return NULL;
}

SERVED_TEST(test_connections_at_once)
{
	at_once(6, hammer);
}

/* The client leaves while its requests are with the backend: they end first, then it. */
SERVED_TEST(test_early_end)
{
	int fd = connected();

	set_hold_back(true);
	for (unsigned i = 0; i < 8; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, i, 0, BLOCK_MAX));
	WAIT_FOR(look(&stacked) == 8);
	close(fd);
	sleep_ms(20);
	CHECK_EQ(look(&pool.opens), 1);
	set_hold_back(false);
	await_open(0);
	CHECK_EQ(look(&pool.free_count), REQUESTS);
}

/* Everything sent before DISC is answered. */
SERVED_TEST(test_disc)
{
	static char block[BLOCK_MAX];
	int fd = connected();

	for (unsigned i = 0; i < 8; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, 5, 0, BLOCK_MAX));
	CHECK(say_request(fd, NBD_CMD_DISC, 0, 0, 0, 0));
	for (unsigned i = 0; i < 8; i++)
		CHECK_EQ(hear_reply(fd, 5, block, BLOCK_MAX), 0);
	await_close(fd);
}

/*
 * Clients that do not read fill their sockets, as many clients as there are workers. No worker
 * may wait for them: another client's requests end meanwhile. When they read at last, nothing was
 * lost; when they never do, they are cut off and their requests come back.
 */
TEST_CASES(test_deaf_clients, 2, read_at_last)
{
	static char block[BLOCK_MAX];
	const unsigned each = (REQUESTS - 4) / 2;
	int deaf[2], fd;

	set_up(read_at_last ? WAIT_S * 1000 : 300);
	deaf[0] = connected();
	deaf[1] = connected();
	fd = connected();
	for (unsigned i = 0; i < 2 * each; i++)
		CHECK(say_request(deaf[i % 2], NBD_CMD_READ, 0, 77, 0, BLOCK_MAX));
	for (unsigned i = 0; i < 50; i++)
		CHECK_EQ(do_read(fd, 0, block, 4096), 0);
	for (unsigned i = 0; i < 2 && read_at_last; i++) {
		for (unsigned k = 0; k < each; k++)
			CHECK_EQ(hear_reply(deaf[i], 77, block, BLOCK_MAX), 0);
		CHECK_EQ(do_read(deaf[i], 0, block, 4096), 0);
	}
	if (!read_at_last)
		await_open(1);
	WAIT_FOR(look(&pool.free_count) == REQUESTS);
	close(deaf[0]);
	close(deaf[1]);
	close(fd);
	tear_down();
}

/*
 * A client that takes a little now and then is never silent for long. It may do so, but not while
 * it holds what is others': then it is cut off, and its requests come back.
 */
TEST_CASES(test_dripping_clients, 2, crowds)
{
	const unsigned count = 4 * REQUESTS;
	static char part[16384];
	size_t left = (size_t)count * (NBD_SIMPLE_REPLY_BYTES + BLOCK_MAX);
	ssize_t got;
	int fd;

	set_up(crowds ? 300 : WAIT_S * 1000);
	set_crowded(crowds);
	fd = connected();
	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, 77, 0, BLOCK_MAX));
	while (left > 0 && (got = recv(fd, part, ISWI_MIN(sizeof(part), left), 0)) > 0) {
		left -= (size_t)got;
		sleep_ms(10);
	}
	CHECK_EQ(left > 0, crowds);
	close(fd);
	await_open(0);
	CHECK_EQ(look(&pool.free_count), REQUESTS);
	tear_down();
}

SERVED_TEST(test_unix_socket_rules)
{
	const struct iswi_nbd_server_config config = config_of(1000);
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct iswi_nbd_server *other;
	struct isw_error error;
	char longer[200];
	int fd;

	CHECK_EQ(iswi_nbd_server_create(&config, &other, &error), 0);
	CHECK_EQ(iswi_nbd_server_listen_unix(other, path, &error), -EADDRINUSE);
	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	CHECK_EQ(iswi_nbd_server_listen_unix(other, longer, &error), -ENAMETOOLONG);
	CHECK_EQ(iswi_nbd_server_listen_unix(other, "nowhere/at.sock", &error), -ENOENT);
	/* Somebody's file is not ours to replace; a dead server's socket is. */
	CHECK_EQ(iswi_nbd_server_listen_unix(other, "/dev/null", &error), -EEXIST);
	snprintf(address.sun_path, sizeof(address.sun_path), "stale-%d.sock", (int)getpid());
	fd = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK_EQ(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	close(fd);
	CHECK_EQ(iswi_nbd_server_listen_unix(other, address.sun_path, &error), 0);
	fd = dial_unix(address.sun_path);
	CHECK_EQ(try_open(fd, ""), 0);
	close(fd);
	iswi_nbd_server_destroy(other);
	CHECK_EQ(access(address.sun_path, F_OK), -1);
}
