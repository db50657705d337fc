// SPDX-License-Identifier: Apache-2.0
/*
 * A client that shuts a connection down and sends what was in flight there again on another one,
 * as the kernel does: the first connection's requests come before those sent again, or never.
 */
#include "nbd_pool.h"

#define CONNS 4u

/* What one connection is bound to. A slow one gets its requests' memory when the test says so. */
struct end {
	struct fixture *f;
	bool slow;
	unsigned waiting, submitted;
};

struct fixture {
	struct iswi_nbd_server *server;
	char memory[EXPORT_BYTES];
	struct end ends[CONNS];
	struct pool pool;
	unsigned opened; /* under its lock */
};

static int fence_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		      struct iswi_nbd_export *export_out)
{
	struct fixture *f = ctx;

	(void)name;
	CHECK(name_bytes == 0 && conn != NULL);
	pool_open(&f->pool, export_out, NULL);
	pthread_mutex_lock(&f->pool.lock);
	export_out->handle = &f->ends[f->opened++];
	pthread_mutex_unlock(&f->pool.lock);
	return 0;
}

static void fence_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)export;
	(void)conn;
	pool_close(&((struct fixture *)ctx)->pool);
}

static struct iswi_nbd_request *fence_take(struct iswi_nbd_export *export)
{
	struct end *end = export->handle;
	struct pool *pool = &end->f->pool;
	struct iswi_nbd_request *request;

	pthread_mutex_lock(&pool->lock);
	end->waiting++;
	while (end->slow)
		pthread_cond_wait(&pool->changed, &pool->lock);
	end->waiting--;
	request = pool_take(pool);
	pthread_mutex_unlock(&pool->lock);
	return request;
}

static void fence_give(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	pool_put(&((struct end *)export->handle)->f->pool, request);
}

static void fence_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	struct end *end = export->handle;
	struct fixture *f = end->f;

	pthread_mutex_lock(&f->pool.lock);
	end->submitted++;
	if (request->command == NBD_CMD_WRITE)
		memcpy(f->memory + request->offset, request->data, request->length);
	else if (request->command == NBD_CMD_READ)
		memcpy(request->data, f->memory + request->offset, request->length);
	pthread_mutex_unlock(&f->pool.lock);
	iswi_nbd_complete(request, 0);
}

static const struct iswi_nbd_backend backend = {
	.listed = "",
	.open = fence_open,
	.close = fence_close,
	.take = fence_take,
	.submit = fence_submit,
	.give = fence_give,
};

static void set_up(struct fixture *f)
{
	struct iswi_nbd_server_config config = {
		.backend = &backend,
		.ctx = f,
		.connections_max = CONNS,
		.handshake_ms_max = WAIT_S * 1000,
		.fenced = true,
		.send_ms_max = WAIT_S * 1000,
	};

	memset(f, 0, sizeof(*f));
	pool_make(&f->pool);
	for (unsigned i = 0; i < CONNS; i++)
		f->ends[i].f = f;
	CHECK_EQ(iswi_nbd_server_create(&config, &f->server, NULL), 0);
}

static void tear_down(struct fixture *f)
{
	iswi_nbd_server_destroy(f->server);
	pool_free(&f->pool);
}

/* The client's end of a connection without a handshake. */
static int adopted(struct fixture *f)
{
	const unsigned before = look(&f->pool, &f->opened);
	int fds[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	bound_waits(fds[0]);
	CHECK_EQ(iswi_nbd_server_connected(f->server, fds[1], NULL), 0);
	WAIT_FOR(look(&f->pool, &f->opened) == before + 1);
	return fds[0];
}

static void set_slow(struct fixture *f, unsigned end, bool slow)
{
	pool_set(&f->pool, &f->ends[end].slow, slow);
}

/* Without a handshake; one end after the other. */
static void test_in_transmission(struct fixture *f)
{
	int fd = adopted(f);

	fill_bytes(fd, 8192, 7, 4096);
	check_bytes(fd, 8192, 7, 4096);
	close(fd);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
}

/*
 * A write has been received and not been submitted when its connection is shut down; it is sent
 * again on another, then the page is written anew. The first one must not be submitted after that.
 */
static void test_a_late_write_of_a_dead_connection_is_discarded(struct fixture *f)
{
	char old[4096], new[4096];
	int dead = adopted(f), live = adopted(f);

	memset(old, 0xaa, sizeof(old));
	memset(new, 0xbb, sizeof(new));
	CHECK_EQ(do_write(dead, 4096, old, sizeof(old)), 0);
	set_slow(f, 0, true);
	CHECK(say_request(dead, NBD_CMD_WRITE, 0, 1, 0, sizeof(old)));
	CHECK(say(dead, old, sizeof(old)));
	WAIT_FOR(look(&f->pool, &f->ends[0].waiting) == 1);
	CHECK_EQ(shutdown(dead, SHUT_RDWR), 0);

	CHECK_EQ(do_write(live, 0, old, sizeof(old)), 0);
	CHECK_EQ(do_write(live, 0, new, sizeof(new)), 0);
	set_slow(f, 0, false);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 1);
	CHECK_EQ(look(&f->pool, &f->ends[0].submitted), 1);
	check_bytes(live, 0, 0xbb, 4096);
	close(dead);
	close(live);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
}

/* One that is only slow is served: nobody has shut it down. */
static void test_a_slow_connection_is_not_a_dead_one(struct fixture *f)
{
	char block[4096] = {1};
	int slow = adopted(f), live = adopted(f);

	set_slow(f, 0, true);
	CHECK(say_request(slow, NBD_CMD_WRITE, 0, 1, 0, sizeof(block)));
	CHECK(say(slow, block, sizeof(block)));
	WAIT_FOR(look(&f->pool, &f->ends[0].waiting) == 1);
	CHECK_EQ(do_write(live, 4096, block, sizeof(block)), 0);
	set_slow(f, 0, false);
	CHECK_EQ(hear_reply(slow, 1, NULL, 0), 0);
	CHECK_EQ(do_read(slow, 0, block, sizeof(block)), 0);
	close(slow);
	close(live);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
}

static void test_more_than_there_is_room_for(struct fixture *f)
{
	struct isw_error error;
	int fds[2], ends[CONNS];

	for (unsigned i = 0; i < CONNS; i++)
		ends[i] = adopted(f);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	CHECK_EQ(iswi_nbd_server_connected(f->server, fds[1], &error), -EMFILE);
	hear_close(fds[0]); /* it was taken all the same */
	close(fds[0]);
	for (unsigned i = 0; i < CONNS; i++)
		close(ends[i]);
	WAIT_FOR(look(&f->pool, &f->pool.opens) == 0);
}

int main(void)
{
	static struct fixture f;
	void (*const tests[])(struct fixture *) = {
		test_in_transmission,
		test_a_late_write_of_a_dead_connection_is_discarded,
		test_a_slow_connection_is_not_a_dead_one,
		test_more_than_there_is_room_for,
	};

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(tests); i++) {
		set_up(&f);
		tests[i](&f);
		tear_down(&f);
	}
	return 0;
}
