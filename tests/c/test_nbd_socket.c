// SPDX-License-Identifier: Apache-2.0
/*
 * The nbd-socket front end over an engine made for this test: what reaches the engine, how many
 * requests at once, and that the end waits for those in flight.
 */
#include "frontend_fixture.h"
#include "nbd_fixture.h"

#define REQUEST_MAX  MIB
#define REQUESTS_MAX 8u

struct fixture {
	struct isw_engine engine;
	isw_frontend *frontend;
	char path[64];
};

static int listen_at(struct fixture *f, const char *path, isw_frontend **frontend_out,
		     struct isw_error *error)
{
	const struct isw_frontend_config config = {.path = path};

	return isw_frontend_start(&f->engine, "nbd-socket", &config, frontend_out, error);
}

static void set_up(struct fixture *f)
{
	struct isw_error error;

	engine_start(&f->engine, REVERSED, REQUESTS_MAX);
	snprintf(f->path, sizeof(f->path), "nbd-socket-%d.sock", (int)getpid());
	CHECK_EQ(listen_at(f, f->path, &f->frontend, &error), 0);
}

static void tear_down(struct fixture *f)
{
	isw_frontend_destroy(f->frontend);
	CHECK_EQ(access(f->path, F_OK), -1);
	engine_stop(&f->engine);
}

static void hold_back(struct fixture *f, bool held_back)
{
	engine_complete(&f->engine, held_back ? HELD : REVERSED);
}

static uint32_t in_flight(struct fixture *f)
{
	return counted(&f->engine, &f->engine.in_flight);
}

static int connected(struct fixture *f)
{
	int fd = dial_unix(f->path);

	CHECK_EQ(try_open(fd, ""), 0);
	return fd;
}

static void check_last(struct fixture *f, enum iswi_req_op op, uint32_t flags, uint64_t offset,
		       uint64_t length)
{
	pthread_mutex_lock(&f->engine.lock);
	CHECK_EQ(f->engine.last.op, op);
	CHECK_EQ(f->engine.last.flags, flags);
	CHECK_EQ(f->engine.last.offset, offset);
	CHECK_EQ(f->engine.last.length, length);
	pthread_mutex_unlock(&f->engine.lock);
}

static void test_what_is_offered(struct fixture *f)
{
	struct described described = {0};
	char entry[8];
	uint32_t bytes;
	int fd = dial_unix(f->path);

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

static void test_what_reaches_the_engine(struct fixture *f)
{
	static char data[REQUEST_MAX];
	int fd = connected(f), other = connected(f);

	memset(data, 4, sizeof(data));
	CHECK_EQ(do_write(fd, 4096, data, sizeof(data)), 0);
	check_last(f, ISWI_WRITE, 0, 4096, sizeof(data));
	memset(data, 0, sizeof(data));
	CHECK_EQ(do_read(other, 4096, data, sizeof(data)), 0);
	CHECK(all_bytes(data, 4, sizeof(data)));
	check_last(f, ISWI_READ, 0, 4096, sizeof(data));
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, 0, 2 * REQUEST_MAX), 0);
	check_last(f, ISWI_TRIM, 0, 0, 2 * REQUEST_MAX);
	CHECK_EQ(do_command(fd, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA | NBD_CMD_FLAG_NO_HOLE, 8192,
			    4096),
		 0);
	check_last(f, ISWI_ZERO, ISWI_REQ_FUA, 8192, 4096);
	CHECK_EQ(do_command(fd, NBD_CMD_FLUSH, 0, 4096, 4096), 0);
	check_last(f, ISWI_FLUSH, 0, 0, 0);
	CHECK(say_request(fd, NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 3, 0, 4096));
	CHECK(say(fd, data, 4096));
	CHECK_EQ(hear_reply(fd, 3, NULL, 0), 0);
	check_last(f, ISWI_WRITE, ISWI_REQ_FUA, 0, 4096);
	/* And what does not. */
	CHECK_EQ(do_read(fd, 512, data, 4096), NBD_EINVAL);
	CHECK_EQ(do_write(fd, 0, data, 512), NBD_EINVAL);
	CHECK_EQ(do_write(fd, SIZE_BYTES, data, 4096), NBD_ENOSPC);
	CHECK_EQ(do_read(fd, 0, data, REQUEST_MAX + 4096), NBD_EINVAL);
	check_last(f, ISWI_WRITE, ISWI_REQ_FUA, 0, 4096);
	engine_fail_with(&f->engine, -EIO);
	CHECK_EQ(do_read(fd, 0, data, 4096), NBD_EIO);
	CHECK_EQ(do_write(fd, 0, data, 4096), NBD_EIO);
	engine_fail_with(&f->engine, 0);
	CHECK_EQ(do_read(fd, 0, data, 4096), 0);
	close(fd);
	close(other);
}

/* More than the engine takes: the rest waits, is lost by nobody, and is never refused. */
static void test_more_requests_than_buffers(struct fixture *f)
{
	const unsigned count = 5 * REQUESTS_MAX;
	char page[4096];
	int fds[2] = {connected(f), connected(f)};

	hold_back(f, true);
	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(fds[i % 2], NBD_CMD_READ, 0, 1, 4096 * i, sizeof(page)));
	WAIT_FOR(in_flight(f) == REQUESTS_MAX);
	hold_back(f, false);
	for (unsigned i = 0; i < count; i++)
		CHECK_EQ(hear_reply(fds[i % 2], 1, page, sizeof(page)), 0);
	CHECK_EQ(f->engine.in_flight_max, REQUESTS_MAX);
	close(fds[0]);
	close(fds[1]);
}

/*
 * One reads nothing: its answers keep the buffers it got. Another's requests are served meanwhile,
 * and the first is still there to read everything at last.
 */
static void test_a_client_that_reads_nothing_keeps_nobody_else_waiting(struct fixture *f)
{
	const unsigned count = 3 * REQUESTS_MAX;
	static char data[REQUEST_MAX];
	char page[ISW_PAGE_BYTES];
	const uint32_t before = counted(&f->engine, &f->engine.submitted);
	int deaf = connected(f), other;

	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(deaf, NBD_CMD_READ, 0, 9, 0, REQUEST_MAX));
	/* It holds all that it will get. */
	WAIT_FOR(counted(&f->engine, &f->engine.submitted) - before >= REQUESTS_MAX - 1 &&
		 in_flight(f) == 0);
	other = connected(f);
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
static void test_end_waits_for_the_engine(struct fixture *f)
{
	pthread_t destroyer;
	int fds[2] = {connected(f), connected(f)};

	hold_back(f, true);
	for (unsigned i = 0; i < 2 * REQUESTS_MAX; i++)
		CHECK(say_request(fds[i % 2], NBD_CMD_READ, 0, 1, 0, 4096));
	WAIT_FOR(in_flight(f) == REQUESTS_MAX);
	CHECK_EQ(iswi_thread_start(&destroyer, "destroyer", destroy_main, f->frontend), 0);
	WAIT_FOR(access(f->path, F_OK) != 0);
	CHECK_EQ(in_flight(f), REQUESTS_MAX);
	hold_back(f, false);
	pthread_join(destroyer, NULL);
	CHECK_EQ(in_flight(f), 0);
	f->frontend = NULL;
	close(fds[0]);
	close(fds[1]);
}

static void test_bad_paths(struct fixture *f)
{
	struct isw_error error;
	isw_frontend *frontend;

	CHECK_EQ(listen_at(f, "nowhere/at.sock", &frontend, &error), -ENOENT);
	CHECK(strstr(error.text, "nowhere/at.sock") != NULL);
	CHECK_EQ(listen_at(f, f->path, &frontend, &error), -EADDRINUSE);
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
static void test_what_a_kind_lacks(struct fixture *f)
{
	const struct isw_frontend_config config = {.path = f->path};
	char note[ISW_FRONTEND_NOTE_BYTES_MAX];
	struct isw_error error;
	isw_frontend *frontend;
	int32_t fd;

	CHECK_EQ(isw_frontend_start(&f->engine, "no such", &config, &frontend, &error), -EINVAL);
	CHECK(frontend == NULL && strstr(error.text, "no such") != NULL);
	CHECK_EQ(isw_frontend_prepare(&f->engine, "nbd-socket", &config, &frontend, &error),
		 -EINVAL);
	CHECK_EQ(isw_frontend_handover(f->frontend, &fd, note, &error), -EINVAL);
	CHECK_EQ(fd, -1);
	CHECK_EQ(isw_frontend_take_over(f->frontend, 0, &error), -EINVAL);
	CHECK_EQ(isw_frontend_rings(f->frontend, &fd, 1), 0);
}

/* The front end for the kernel: sockets in transmission, counted; one that ends is reported. */
static void test_sockets_that_are_given(struct fixture *f)
{
	const struct isw_frontend_config config = {.request_bytes_max = ISW_PAGE_BYTES};
	char block[ISW_PAGE_BYTES] = {0};
	struct isw_error error;
	isw_frontend *frontend;
	int first[2], second[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, first), 0);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, second), 0);
	bound_waits(first[0]);
	bound_waits(second[0]);
	CHECK_EQ(isw_frontend_serve(f->frontend, first[1], &error), -EINVAL);
	CHECK_EQ(isw_frontend_start(&f->engine, "nbd", &config, &frontend, &error), 0);
	CHECK_EQ(isw_frontend_serve(frontend, first[1], &error), 0);
	CHECK_EQ(isw_frontend_serve(frontend, second[1], &error), 0);
	CHECK_EQ(isw_frontend_serve(frontend, -1, &error), -EBADF);
	close(first[1]); /* it has one of its own */
	close(second[1]);
	CHECK_EQ(connections(frontend), 2);
	CHECK_EQ(do_write(first[0], 0, block, sizeof(block)), 0);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	CHECK(say_request(second[0], NBD_CMD_READ, 0, 3, 0, 2 * ISW_PAGE_BYTES));
	CHECK_EQ(hear_reply(second[0], 3, NULL, 0), NBD_EINVAL);
	CHECK_EQ(counted(&f->engine, &f->engine.connections_lost), 0);
	/* Reported when it ends, not when the last of its requests has. */
	hold_back(f, true);
	CHECK(say_request(first[0], NBD_CMD_READ, 0, 4, 0, ISW_PAGE_BYTES));
	WAIT_FOR(in_flight(f) == 1);
	close(first[0]);
	WAIT_FOR(counted(&f->engine, &f->engine.connections_lost) == 1);
	CHECK_EQ(in_flight(f), 1);
	CHECK_EQ(connections(frontend), 1);
	hold_back(f, false);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	isw_frontend_destroy(frontend);
	await_close(second[0]);
}

int main(void)
{
	static struct fixture f;

	isw_frontend_destroy(NULL);
	set_up(&f);
	test_what_is_offered(&f);
	test_what_reaches_the_engine(&f);
	test_more_requests_than_buffers(&f);
	test_a_client_that_reads_nothing_keeps_nobody_else_waiting(&f);
	test_bad_paths(&f);
	test_what_a_kind_lacks(&f);
	test_sockets_that_are_given(&f);
	test_end_waits_for_the_engine(&f);
	tear_down(&f);
	return 0;
}
