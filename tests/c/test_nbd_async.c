// SPDX-License-Identifier: Apache-2.0
/* Requests that end on other threads: order, many connections, a deaf client, an early end. */
#include "nbd_pool.h"

/*
 * The backend: requests wait in a stack until a worker takes them - the last first, so that
 * answers come out of order - or, while `hold_back` is set, until the test lets them go.
 */
struct fixture {
	struct iswi_nbd_server *server;
	char path[64];
	char *memory;
	pthread_t workers[2];
	struct pool pool;
	/* Under its lock. */
	struct iswi_nbd_request *stack;
	unsigned stacked;
	bool hold_back, ending;
	atomic_bool crowded; /* relaxed */
};

static int test_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		     struct iswi_nbd_export *export_out)
{
	struct fixture *f = ctx;

	(void)name;
	if (name_bytes != 0)
		return -ENOENT;
	pool_open(&f->pool, export_out, f);
	if (conn == NULL) /* it is only asked for */
		pool_close(&f->pool);
	return 0;
}

static void test_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)export;
	(void)conn;
	pool_close(&((struct fixture *)ctx)->pool);
}

static struct iswi_nbd_request *test_take(struct iswi_nbd_export *export)
{
	struct fixture *f = export->handle;
	struct iswi_nbd_request *request;

	pthread_mutex_lock(&f->pool.lock);
	request = pool_take(&f->pool);
	pthread_mutex_unlock(&f->pool.lock);
	return request;
}

static void test_give(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	pool_put(&((struct fixture *)export->handle)->pool, request);
}

static void test_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	struct fixture *f = export->handle;

	if (request->command == NBD_CMD_FLUSH) { /* inside submit is allowed, too */
		iswi_nbd_complete(request, 0);
		return;
	}
	pthread_mutex_lock(&f->pool.lock);
	request->next = f->stack;
	f->stack = request;
	f->stacked++;
	pthread_cond_broadcast(&f->pool.changed);
	pthread_mutex_unlock(&f->pool.lock);
}

static bool test_crowds(struct iswi_nbd_export *export)
{
	struct fixture *f = export->handle;

	return atomic_load_explicit(&f->crowded, memory_order_relaxed);
}

static const struct iswi_nbd_backend backend = {
	.listed = "",
	.open = test_open,
	.close = test_close,
	.take = test_take,
	.submit = test_submit,
	.give = test_give,
	.crowds = test_crowds,
};

/* f->pool.lock held, so that bytes of the same request order as their requests end. */
static int execute(struct fixture *f, const struct iswi_nbd_request *request)
{
	char *at = f->memory + request->offset;

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
	struct fixture *f = opaque;

	pthread_mutex_lock(&f->pool.lock);
	while (!f->ending) {
		struct iswi_nbd_request *request = f->stack;
		int error;

		if (request == NULL || f->hold_back) {
			pthread_cond_wait(&f->pool.changed, &f->pool.lock);
			continue;
		}
		f->stack = request->next;
		f->stacked--;
		error = execute(f, request);
		pthread_mutex_unlock(&f->pool.lock);
		iswi_nbd_complete(request, error);
		pthread_mutex_lock(&f->pool.lock);
	}
	pthread_mutex_unlock(&f->pool.lock);
	return NULL;
}

static void set_up(struct fixture *f, uint32_t send_ms)
{
	struct iswi_nbd_server_config config = {
		.backend = &backend,
		.ctx = f,
		.connections_max = 8,
		.handshake_ms_max = WAIT_S * 1000,
		.send_ms_max = send_ms,
	};

	memset(f, 0, sizeof(*f));
	atomic_init(&f->crowded, false);
	snprintf(f->path, sizeof(f->path), "nbd-async-%d.sock", (int)getpid());
	pool_make(&f->pool);
	f->memory = calloc(1, EXPORT_BYTES);
	CHECK(f->memory != NULL);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(f->workers); i++)
		CHECK_EQ(iswi_thread_start(&f->workers[i], "worker", worker, f), 0);
	CHECK_EQ(iswi_nbd_server_create(&config, &f->server, NULL), 0);
	CHECK_EQ(iswi_nbd_server_listen_unix(f->server, f->path, NULL), 0);
}

static void set_hold_back(struct fixture *f, bool hold_back)
{
	pool_set(&f->pool, &f->hold_back, hold_back);
}

static void tear_down(struct fixture *f)
{
	set_hold_back(f, false);
	iswi_nbd_server_destroy(f->server);
	CHECK_EQ(access(f->path, F_OK), -1);
	pool_set(&f->pool, &f->ending, true);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(f->workers); i++)
		pthread_join(f->workers[i], NULL);
	pool_free(&f->pool);
	free(f->memory);
}

static int connected(struct fixture *f)
{
	int fd = dial_unix(f->path);

	CHECK_EQ(try_open(fd, ""), 0);
	return fd;
}

static void test_requests(struct fixture *f)
{
	static char out[BLOCK_MAX], in[BLOCK_MAX];
	struct iswi_nbd_server_stats stats;
	int fd = connected(f);

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
	WAIT_FOR(look(&f->pool, &f->pool.free_count) == REQUESTS);
	iswi_nbd_server_stats(f->server, &stats);
	CHECK_EQ(stats.read_requests, 3);
	CHECK_EQ(stats.write_requests, 1);
	CHECK_EQ(stats.read_bytes, BLOCK_MAX + 8192 + 4096);
	CHECK_EQ(stats.request_errors, 6);
	close(fd);
}

/* Many in flight, answered in any order; each answer has its own request's bytes. */
static void test_out_of_order(struct fixture *f)
{
	static char block[BLOCK_MAX];
	bool seen[64] = {false};
	int fd = connected(f);

	for (unsigned i = 0; i < 64; i++) {
		fill_bytes(fd, i * 4096, (int)i + 1, 4096);
	}
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
}

struct hammer {
	struct fixture *f;
	uint64_t base;
};

static void *hammer(void *opaque)
{
	struct hammer *h = opaque;
	int fd = connected(h->f);

	for (unsigned i = 0; i < 400; i++) {
		uint64_t offset = h->base + 4096 * (i % 8);

		fill_bytes(fd, offset, (int)(i % 250) + 1, 4096);
		check_bytes(fd, offset, (int)(i % 250) + 1, 4096);
	}
	close(fd);
	return NULL;
}

static void test_connections_at_once(struct fixture *f)
{
	struct hammer hammers[6];
	pthread_t threads[6];

	for (unsigned i = 0; i < 6; i++) {
		hammers[i] = (struct hammer){.f = f, .base = i * 65536};
		CHECK_EQ(iswi_thread_start(&threads[i], "hammer", hammer, &hammers[i]), 0);
	}
	for (unsigned i = 0; i < 6; i++)
		pthread_join(threads[i], NULL);
}

/* The client leaves while its requests are with the backend: they end first, then it. */
static void test_early_end(struct fixture *f)
{
	int fd = connected(f);

	set_hold_back(f, true);
	for (unsigned i = 0; i < 8; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, i, 0, BLOCK_MAX));
	WAIT_FOR(look(&f->pool, &f->stacked) == 8);
	close(fd);
	sleep_ms(20);
	CHECK_EQ(look(&f->pool, &f->pool.opens), 1);
	set_hold_back(f, false);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
	CHECK_EQ(look(&f->pool, &f->pool.free_count), REQUESTS);
}

/* Everything sent before DISC is answered. */
static void test_disc(struct fixture *f)
{
	static char block[BLOCK_MAX];
	int fd = connected(f);

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
static void test_deaf_clients(struct fixture *f, bool read_at_last)
{
	static char block[BLOCK_MAX];
	const unsigned each = (REQUESTS - 4) / 2;
	int deaf[2] = {connected(f), connected(f)}, fd = connected(f);

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
		WAIT_FOR(look(&f->pool, &f->pool.opens) == 1);
	WAIT_FOR(look(&f->pool, &f->pool.free_count) == REQUESTS);
	close(deaf[0]);
	close(deaf[1]);
	close(fd);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
}

/*
 * A client that takes a little now and then is never silent for long. It may do so, but not while
 * it holds what is others': then it is cut off, and its requests come back. Returns whether it got
 * all of its answers.
 */
static bool dripped(struct fixture *f, bool crowded)
{
	const unsigned count = 4 * REQUESTS;
	static char part[16384];
	size_t left = (size_t)count * (NBD_SIMPLE_REPLY_BYTES + BLOCK_MAX);
	int fd = connected(f);

	atomic_store_explicit(&f->crowded, crowded, memory_order_relaxed);
	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(fd, NBD_CMD_READ, 0, 77, 0, BLOCK_MAX));
	while (left > 0) {
		ssize_t got = recv(fd, part, ISWI_MIN(sizeof(part), left), 0);

		if (got <= 0)
			break;
		left -= (size_t)got;
		sleep_ms(10);
	}
	close(fd);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
	CHECK_EQ(look(&f->pool, &f->pool.free_count), REQUESTS);
	atomic_store_explicit(&f->crowded, false, memory_order_relaxed);
	return left == 0;
}

static void test_unix_socket_rules(struct fixture *f)
{
	struct iswi_nbd_server_config config = {
		.backend = &backend,
		.ctx = f,
		.connections_max = 1,
		.handshake_ms_max = 1000,
		.send_ms_max = 1000,
	};
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct iswi_nbd_server *other;
	struct isw_error error;
	char longer[200];
	int fd;

	CHECK_EQ(iswi_nbd_server_create(&config, &other, &error), 0);
	CHECK_EQ(iswi_nbd_server_listen_unix(other, f->path, &error), -EADDRINUSE);
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

int main(void)
{
	struct fixture f;

	set_up(&f, WAIT_S * 1000);
	test_requests(&f);
	test_out_of_order(&f);
	test_connections_at_once(&f);
	WAIT_FOR(look(&f.pool, &f.pool.opens) == 0);
	test_early_end(&f);
	test_disc(&f);
	test_deaf_clients(&f, true);
	CHECK(dripped(&f, false));
	/* Who reads what it asks for is not disturbed by the question. */
	atomic_store_explicit(&f.crowded, true, memory_order_relaxed);
	test_out_of_order(&f);
	atomic_store_explicit(&f.crowded, false, memory_order_relaxed);
	WAIT_FOR(look(&f.pool, &f.pool.opens) == 0);
	test_unix_socket_rules(&f);
	WAIT_FOR(look(&f.pool, &f.pool.opens) == 0);
	tear_down(&f);
	set_up(&f, 300);
	test_deaf_clients(&f, false);
	CHECK(!dripped(&f, true));
	tear_down(&f);
	return 0;
}
