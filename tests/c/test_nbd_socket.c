// SPDX-License-Identifier: Apache-2.0
/*
 * The nbd-socket front end over an engine made for this test: what reaches the engine, how many
 * requests at once, and that the end waits for those in flight.
 */
#include "frontend_fixture.h"
#include "nbd_fixture.h"
#include "tests_between.h"

#define REQUEST_MAX  MIB
#define REQUESTS_MAX 8u

static isw_frontend *frontend;
static char path[64];

static int listen_at(const char *at, isw_frontend **frontend_out, struct isw_error *error)
{
	const struct isw_frontend_config config = {.path = at};

	return isw_frontend_start(&engine, "nbd-socket", &config, frontend_out, error);
}

static void set_up(void)
{
	struct isw_error error;

	engine_start(REVERSED, REQUESTS_MAX);
	snprintf(path, sizeof(path), "nbd-socket-%d.sock", (int)getpid());
	CHECK_EQ(listen_at(path, &frontend, &error), 0);
}

static void tear_down(void)
{
	isw_frontend_destroy(frontend);
	CHECK_EQ(access(path, F_OK), -1);
	engine_stop();
}

#define SERVED_TEST(name) BETWEEN_TEST(name, set_up(), tear_down())

static void hold_back(bool held_back)
{
	engine_complete(held_back ? HELD : REVERSED);
}

static uint32_t in_flight(void)
{
	return counted(&engine.in_flight);
}

static int connected(void)
{
	int fd = dial_unix(path);

	CHECK_EQ(try_open(fd, ""), 0);
	return fd;
}

static void check_last(enum iswi_req_op op, uint32_t flags, uint64_t offset, uint64_t length)
{
	pthread_mutex_lock(&engine.lock);
	CHECK_EQ(engine.last.op, op);
	CHECK_EQ(engine.last.flags, flags);
	CHECK_EQ(engine.last.offset, offset);
	CHECK_EQ(engine.last.length, length);
	pthread_mutex_unlock(&engine.lock);
}

SERVED_TEST(test_what_is_offered)
{
	struct described described = {0};
	char entry[8];
	uint32_t bytes;
	int fd = dial_unix(path);

	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	CHECK(say_option(fd, NBD_OPT_LIST, NULL, 0));
	CHECK_EQ(hear_option(fd, NBD_OPT_LIST, entry, sizeof(entry), &bytes), NBD_REP_SERVER);
	CHECK_EQ(bytes, 4);
	CHECK_EQ(nbd_get32(entry), 0);
	CHECK_EQ(hear_option(fd, NBD_OPT_LIST, NULL, 0, NULL), NBD_REP_ACK);
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, "other", NULL), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(ask_export(fd, NBD_OPT_INFO, "", &described), NBD_REP_ACK);
	CHECK_EQ(described.size, SIZE_BYTES);
	CHECK_EQ(described.block_min, ISW_PAGE_BYTES);
	CHECK_EQ(described.block_max, REQUEST_MAX);
	CHECK((described.flags & NBD_FLAG_CAN_MULTI_CONN) != 0);
	close(fd);
}

SERVED_TEST(test_what_reaches_the_engine)
{
	static char data[REQUEST_MAX];
	int fd = connected(), other = connected();

	memset(data, 4, sizeof(data));
	CHECK_EQ(do_write(fd, 4096, data, sizeof(data)), 0);
	check_last(ISWI_WRITE, 0, 4096, sizeof(data));
	memset(data, 0, sizeof(data));
	CHECK_EQ(do_read(other, 4096, data, sizeof(data)), 0);
	CHECK(all_bytes(data, 4, sizeof(data)));
	check_last(ISWI_READ, 0, 4096, sizeof(data));
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, 0, 2 * REQUEST_MAX), 0);
	check_last(ISWI_TRIM, 0, 0, 2 * REQUEST_MAX);
	CHECK_EQ(do_command(fd, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA | NBD_CMD_FLAG_NO_HOLE, 8192,
			    4096),
		 0);
	check_last(ISWI_ZERO, ISWI_REQ_FUA, 8192, 4096);
	CHECK_EQ(do_command(fd, NBD_CMD_FLUSH, 0, 4096, 4096), 0);
	check_last(ISWI_FLUSH, 0, 0, 0);
	CHECK(say_request(fd, NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 3, 0, 4096));
	CHECK(say(fd, data, 4096));
	CHECK_EQ(hear_reply(fd, 3, NULL, 0), 0);
	check_last(ISWI_WRITE, ISWI_REQ_FUA, 0, 4096);
	/* And what does not. */
	CHECK_EQ(do_read(fd, 512, data, 4096), NBD_EINVAL);
	CHECK_EQ(do_write(fd, 0, data, 512), NBD_EINVAL);
	CHECK_EQ(do_write(fd, SIZE_BYTES, data, 4096), NBD_ENOSPC);
	CHECK_EQ(do_read(fd, 0, data, REQUEST_MAX + 4096), NBD_EINVAL);
	check_last(ISWI_WRITE, ISWI_REQ_FUA, 0, 4096);
	engine_fail_with(-EIO);
	CHECK_EQ(do_read(fd, 0, data, 4096), NBD_EIO);
	CHECK_EQ(do_write(fd, 0, data, 4096), NBD_EIO);
	engine_fail_with(0);
	CHECK_EQ(do_read(fd, 0, data, 4096), 0);
	close(fd);
	close(other);
}

/* More than the engine takes: the rest waits, is lost by nobody, and is never refused. */
SERVED_TEST(test_more_requests_than_buffers)
{
	const unsigned count = 5 * REQUESTS_MAX;
	char page[4096];
	int fds[2] = {connected(), connected()};

	hold_back(true);
	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(fds[i % 2], NBD_CMD_READ, 0, 1, 4096 * i, sizeof(page)));
	WAIT_FOR(in_flight() == REQUESTS_MAX);
	hold_back(false);
	for (unsigned i = 0; i < count; i++)
		CHECK_EQ(hear_reply(fds[i % 2], 1, page, sizeof(page)), 0);
	CHECK_EQ(engine.in_flight_max, REQUESTS_MAX);
	close(fds[0]);
	close(fds[1]);
}

/*
 * One reads nothing: its answers keep the buffers it got. Another's requests are served meanwhile,
 * and the first is still there to read everything at last.
 */
SERVED_TEST(test_a_client_that_reads_nothing_keeps_nobody_else_waiting)
{
	const unsigned count = 3 * REQUESTS_MAX;
	static char data[REQUEST_MAX];
	char page[ISW_PAGE_BYTES];
	int deaf = connected(), other;

	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(deaf, NBD_CMD_READ, 0, 9, 0, REQUEST_MAX));
	/* It holds all that it will get. */
	WAIT_FOR(counted(&engine.submitted) >= REQUESTS_MAX - 1 && in_flight() == 0);
	other = connected();
	for (unsigned i = 0; i < count; i++) {
		CHECK_EQ(do_read(other, 0, page, sizeof(page)), 0);
		CHECK_EQ(do_write(other, 4096, page, sizeof(page)), 0);
	}
	for (unsigned i = 0; i < count; i++)
		CHECK_EQ(hear_reply(deaf, 9, data, sizeof(data)), 0);
	close(deaf);
	close(other);
}

static void *destroy_main(void *opaque)
{
	isw_frontend_destroy(opaque);
	return NULL;
}

/* The end of the front end waits for the engine: its buffers are the engine's until then. */
SERVED_TEST(test_end_waits_for_the_engine)
{
	pthread_t destroyer;
	int fds[2] = {connected(), connected()};

	hold_back(true);
	for (unsigned i = 0; i < 2 * REQUESTS_MAX; i++)
		CHECK(say_request(fds[i % 2], NBD_CMD_READ, 0, 1, 0, 4096));
	WAIT_FOR(in_flight() == REQUESTS_MAX);
	CHECK_EQ(iswi_thread_start(&destroyer, "destroyer", destroy_main, frontend), 0);
	WAIT_FOR(access(path, F_OK) != 0);
	CHECK_EQ(in_flight(), REQUESTS_MAX);
	hold_back(false);
	pthread_join(destroyer, NULL);
	CHECK_EQ(in_flight(), 0);
	frontend = NULL;
	close(fds[0]);
	close(fds[1]);
}

SERVED_TEST(test_bad_paths)
{
	struct isw_error error;
	isw_frontend *other;

	isw_frontend_destroy(NULL);
	CHECK_EQ(listen_at("nowhere/at.sock", &other, &error), -ENOENT);
	CHECK(strstr(error.text, "nowhere/at.sock") != NULL);
	CHECK_EQ(listen_at(path, &other, &error), -EADDRINUSE);
}

static uint32_t connections(isw_frontend *frontend)
{
	struct isw_frontend_info info;

	isw_frontend_info(frontend, &info);
	CHECK_EQ(info.size_bytes, SIZE_BYTES);
	CHECK_EQ(info.requests_max, REQUESTS_MAX);
	return info.connections;
}

/* What a kind of front end lacks is refused, not called. */
SERVED_TEST(test_what_a_kind_lacks)
{
	const struct isw_frontend_config config = {.path = path};
	char note[ISW_FRONTEND_NOTE_BYTES_MAX];
	struct isw_error error;
	isw_frontend *other;
	int32_t fd;

	CHECK_EQ(isw_frontend_start(&engine, "no such", &config, &other, &error), -EINVAL);
	CHECK(other == NULL && strstr(error.text, "no such") != NULL);
	CHECK_EQ(isw_frontend_prepare(&engine, "nbd-socket", &config, &other, &error), -EINVAL);
	CHECK_EQ(isw_frontend_handover(frontend, &fd, note, &error), -EINVAL);
	CHECK_EQ(fd, -1);
	CHECK_EQ(isw_frontend_take_over(frontend, 0, &error), -EINVAL);
	CHECK_EQ(isw_frontend_rings(frontend, &fd, 1), 0);
}

/* The front end for the kernel: sockets in transmission, counted; one that ends is reported. */
SERVED_TEST(test_sockets_that_are_given)
{
	const struct isw_frontend_config config = {.request_bytes_max = ISW_PAGE_BYTES};
	char block[ISW_PAGE_BYTES] = {0};
	struct isw_error error;
	isw_frontend *kernel;
	int first[2], second[2];

	make_ends(SOCK_STREAM, first);
	make_ends(SOCK_STREAM, second);
	CHECK_EQ(isw_frontend_serve(frontend, first[1], &error), -EINVAL);
	CHECK_EQ(isw_frontend_start(&engine, "nbd", &config, &kernel, &error), 0);
	CHECK_EQ(isw_frontend_serve(kernel, first[1], &error), 0);
	CHECK_EQ(isw_frontend_serve(kernel, second[1], &error), 0);
	CHECK_EQ(isw_frontend_serve(kernel, -1, &error), -EBADF);
	close(first[1]); /* it has one of its own */
	close(second[1]);
	CHECK_EQ(connections(kernel), 2);
	CHECK_EQ(do_write(first[0], 0, block, sizeof(block)), 0);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	CHECK(say_request(second[0], NBD_CMD_READ, 0, 3, 0, 2 * ISW_PAGE_BYTES));
	CHECK_EQ(hear_reply(second[0], 3, NULL, 0), NBD_EINVAL);
	CHECK_EQ(counted(&engine.connections_lost), 0);
	/* Reported when it ends, not when the last of its requests has. */
	hold_back(true);
	CHECK(say_request(first[0], NBD_CMD_READ, 0, 4, 0, ISW_PAGE_BYTES));
	WAIT_FOR(in_flight() == 1);
	close(first[0]);
	WAIT_FOR(counted(&engine.connections_lost) == 1);
	CHECK_EQ(in_flight(), 1);
	CHECK_EQ(connections(kernel), 1);
	hold_back(false);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	isw_frontend_destroy(kernel);
	await_close(second[0]);
}
