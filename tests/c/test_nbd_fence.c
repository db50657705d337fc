// SPDX-License-Identifier: Apache-2.0
/*
 * A client that shuts a connection down and sends what was in flight there again on another one,
 * as the kernel does: the first connection's requests come before those sent again, or never.
 */
#include "nbd_pool.h"

#define CONNS 4u

/* What one connection is bound to. A slow one gets its requests' memory when the test says so. */
static struct end {
	bool slow;
	unsigned waiting, submitted;
} ends[CONNS];

static struct iswi_nbd_server *server;
static char memory[EXPORT_BYTES];
static unsigned opened; /* under the pool's lock */

static int fence_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		      struct iswi_nbd_export *export_out)
{
	(void)ctx, (void)name;
	CHECK(name_bytes == 0 && conn != NULL);
	pool_open(export_out);
	pthread_mutex_lock(&pool.lock);
	export_out->handle = &ends[opened++];
	pthread_mutex_unlock(&pool.lock);
	return 0;
}

static struct iswi_nbd_request *fence_take(struct iswi_nbd_export *export)
{
	struct end *end = export->handle;
	struct iswi_nbd_request *request;

	pthread_mutex_lock(&pool.lock);
	end->waiting++;
	while (end->slow)
		pthread_cond_wait(&pool.changed, &pool.lock);
	end->waiting--;
	request = pool_take();
	pthread_mutex_unlock(&pool.lock);
	return request;
}

static void fence_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	struct end *end = export->handle;

	pthread_mutex_lock(&pool.lock);
	end->submitted++;
	if (request->command == NBD_CMD_WRITE)
		memcpy(memory + request->offset, request->data, request->length);
	else if (request->command == NBD_CMD_READ)
		memcpy(request->data, memory + request->offset, request->length);
	pthread_mutex_unlock(&pool.lock);
	iswi_nbd_complete(request, 0);
}

static const struct iswi_nbd_backend backend = {
	.listed = "",
	.open = fence_open,
	.close = pool_close,
	.take = fence_take,
	.submit = fence_submit,
	.give = pool_give,
};

static void set_up(void)
{
	struct iswi_nbd_server_config config = {
		.backend = &backend,
		.connections_max = CONNS,
		.handshake_ms_max = WAIT_S * 1000,
		.fenced = true,
		.send_ms_max = WAIT_S * 1000,
	};

	memset(ends, 0, sizeof(ends));
	opened = 0;
	pool_make();
	CHECK_EQ(iswi_nbd_server_create(&config, &server, NULL), 0);
}

static void tear_down(void)
{
	await_open(0);
	iswi_nbd_server_destroy(server);
	pool_free();
}

/* The client's end of a connection without a handshake. */
static int served(void)
{
	const unsigned before = look(&opened);
	int ends[2];

	make_ends(SOCK_STREAM, ends);
	CHECK_EQ(iswi_nbd_server_connected(server, ends[1], NULL), 0);
	WAIT_FOR(look(&opened) == before + 1);
	return ends[0];
}

static void set_slow(unsigned end, bool slow)
{
	pool_set(&ends[end].slow, slow);
}

/* Without a handshake; one end after the other. */
BETWEEN_TEST(test_in_transmission, set_up(), tear_down())
{
	int fd = served();

	fill_bytes(fd, 8192, 7, 4096);
	check_bytes(fd, 8192, 7, 4096);
	close(fd);
}

/*
 * A write has been received and not been submitted when its connection is shut down; it is sent
 * again on another, then the page is written anew. The first one must not be submitted after that.
 */
BETWEEN_TEST(test_a_late_write_of_a_dead_connection_is_discarded, set_up(), tear_down())
{
	char old[4096], new[4096];
	int dead = served(), live = served();

	memset(old, 0xaa, sizeof(old));
	memset(new, 0xbb, sizeof(new));
	CHECK_EQ(do_write(dead, 4096, old, sizeof(old)), 0);
	set_slow(0, true);
	CHECK(say_request(dead, NBD_CMD_WRITE, 0, 1, 0, sizeof(old)));
	CHECK(say(dead, old, sizeof(old)));
	WAIT_FOR(look(&ends[0].waiting) == 1);
	CHECK_EQ(shutdown(dead, SHUT_RDWR), 0);

	CHECK_EQ(do_write(live, 0, old, sizeof(old)), 0);
	CHECK_EQ(do_write(live, 0, new, sizeof(new)), 0);
	set_slow(0, false);
	await_open(1);
	CHECK_EQ(look(&ends[0].submitted), 1);
	check_bytes(live, 0, 0xbb, 4096);
	close(dead);
	close(live);
}

/* One that is only slow is served: nobody has shut it down. */
BETWEEN_TEST(test_a_slow_connection_is_not_a_dead_one, set_up(), tear_down())
{
	char block[4096] = {1};
	int slow = served(), live = served();

	set_slow(0, true);
	CHECK(say_request(slow, NBD_CMD_WRITE, 0, 1, 0, sizeof(block)));
	CHECK(say(slow, block, sizeof(block)));
	WAIT_FOR(look(&ends[0].waiting) == 1);
	CHECK_EQ(do_write(live, 4096, block, sizeof(block)), 0);
	set_slow(0, false);
	CHECK_EQ(hear_reply(slow, 1, NULL, 0), 0);
	CHECK_EQ(do_read(slow, 0, block, sizeof(block)), 0);
	close(slow);
	close(live);
}

BETWEEN_TEST(test_more_than_there_is_room_for, set_up(), tear_down())
{
	struct isw_error error;
	int ends[2], taken[CONNS];

	for (unsigned i = 0; i < CONNS; i++)
		taken[i] = served();
	make_ends(SOCK_STREAM, ends);
	CHECK_EQ(iswi_nbd_server_connected(server, ends[1], &error), -EMFILE);
	await_close(ends[0]); /* it was taken all the same */
	for (unsigned i = 0; i < CONNS; i++)
		close(taken[i]);
}
