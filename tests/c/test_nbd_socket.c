// SPDX-License-Identifier: Apache-2.0
/*
 * The nbd-socket front end over an engine made for this test: what reaches the engine, how many
 * requests at once, and that the end waits for those in flight.
 */
#include "engine/request.h"
#include "nbd_fixture.h"
#include "util/util.h"

#define SIZE_BYTES   (8u << 20)
#define REQUEST_MAX  (1u << 20)
#define REQUESTS_MAX 8u

/* Requests wait in `queue` until the worker ends them, which it does not while held_back. */
struct isw_engine {
	char *bytes;
	pthread_t worker;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct iswi_req *queue;
	uint32_t in_flight, most_in_flight;
	unsigned submitted;
	bool held_back, stop;
	unsigned connections_lost;
	struct iswi_req last; /* as it was submitted */
	int fail_with;
};

uint64_t iswi_engine_size_bytes(const isw_engine *engine)
{
	(void)engine;
	return SIZE_BYTES;
}

uint32_t iswi_engine_request_bytes_max(const isw_engine *engine)
{
	(void)engine;
	return REQUEST_MAX;
}

uint32_t iswi_engine_requests_max(const isw_engine *engine)
{
	(void)engine;
	return REQUESTS_MAX;
}

void iswi_engine_frontend_down(isw_engine *engine, int error)
{
	(void)engine;
	(void)error;
	CHECK(!"the socket does not end by itself");
}

void iswi_engine_connection_lost(isw_engine *engine)
{
	pthread_mutex_lock(&engine->lock);
	engine->connections_lost++;
	pthread_mutex_unlock(&engine->lock);
}

void iswi_engine_submit(isw_engine *engine, struct iswi_req *req)
{
	pthread_mutex_lock(&engine->lock);
	engine->in_flight++;
	engine->submitted++;
	engine->most_in_flight = ISWI_MAX(engine->most_in_flight, engine->in_flight);
	engine->last.op = req->op;
	engine->last.flags = req->flags;
	engine->last.offset = req->offset;
	engine->last.length = req->length;
	CHECK_EQ((req->offset | req->length) % ISW_PAGE_BYTES, 0);
	CHECK_EQ((uintptr_t)req->data % ISW_PAGE_BYTES, 0);
	req->next = engine->queue;
	engine->queue = req;
	pthread_cond_broadcast(&engine->changed);
	pthread_mutex_unlock(&engine->lock);
}

static void move_bytes(isw_engine *engine, struct iswi_req *req)
{
	char *place = engine->bytes + req->offset;

	if (req->op == ISWI_READ)
		memcpy(req->data, place, req->length);
	else if (req->op == ISWI_WRITE)
		memcpy(place, req->data, req->length);
	else if (req->op != ISWI_FLUSH)
		memset(place, 0, req->length);
}

static void *worker(void *opaque)
{
	isw_engine *engine = opaque;

	pthread_mutex_lock(&engine->lock);
	while (!engine->stop) {
		struct iswi_req *req = engine->queue;
		int error = engine->fail_with;

		if (req == NULL || engine->held_back) {
			pthread_cond_wait(&engine->changed, &engine->lock);
			continue;
		}
		engine->queue = req->next;
		if (error == 0)
			move_bytes(engine, req);
		engine->in_flight--;
		pthread_mutex_unlock(&engine->lock);
		req->done(req, error);
		pthread_mutex_lock(&engine->lock);
	}
	pthread_mutex_unlock(&engine->lock);
	return NULL;
}

struct fixture {
	struct isw_engine engine;
	isw_frontend *frontend;
	char path[64];
};

static void set_up(struct fixture *f)
{
	struct isw_error error;

	memset(f, 0, sizeof(*f));
	f->engine.bytes = calloc(1, SIZE_BYTES);
	CHECK(f->engine.bytes != NULL);
	pthread_mutex_init(&f->engine.lock, NULL);
	pthread_cond_init(&f->engine.changed, NULL);
	CHECK_EQ(iswi_thread_start(&f->engine.worker, "engine", worker, &f->engine), 0);
	snprintf(f->path, sizeof(f->path), "nbd-socket-%d.sock", (int)getpid());
	CHECK_EQ(isw_frontend_nbd_socket(&f->engine, f->path, &f->frontend, &error), 0);
}

static void tear_down(struct fixture *f)
{
	isw_frontend_destroy(f->frontend);
	CHECK_EQ(access(f->path, F_OK), -1);
	CHECK_EQ(f->engine.in_flight, 0);
	pthread_mutex_lock(&f->engine.lock);
	f->engine.stop = true;
	pthread_cond_broadcast(&f->engine.changed);
	pthread_mutex_unlock(&f->engine.lock);
	pthread_join(f->engine.worker, NULL);
	pthread_cond_destroy(&f->engine.changed);
	pthread_mutex_destroy(&f->engine.lock);
	free(f->engine.bytes);
}

static void hold_back(struct fixture *f, bool held_back)
{
	pthread_mutex_lock(&f->engine.lock);
	f->engine.held_back = held_back;
	pthread_cond_broadcast(&f->engine.changed);
	pthread_mutex_unlock(&f->engine.lock);
}

static void fail_with(struct fixture *f, int error)
{
	pthread_mutex_lock(&f->engine.lock);
	f->engine.fail_with = error;
	pthread_mutex_unlock(&f->engine.lock);
}

static uint32_t in_flight(struct fixture *f)
{
	uint32_t count;

	pthread_mutex_lock(&f->engine.lock);
	count = f->engine.in_flight;
	pthread_mutex_unlock(&f->engine.lock);
	return count;
}

static void forget_submitted(struct fixture *f)
{
	pthread_mutex_lock(&f->engine.lock);
	f->engine.submitted = 0;
	pthread_mutex_unlock(&f->engine.lock);
}

static unsigned submitted(struct fixture *f)
{
	unsigned count;

	pthread_mutex_lock(&f->engine.lock);
	count = f->engine.submitted;
	pthread_mutex_unlock(&f->engine.lock);
	return count;
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
	fail_with(f, -EIO);
	CHECK_EQ(do_read(fd, 0, data, 4096), NBD_EIO);
	CHECK_EQ(do_write(fd, 0, data, 4096), NBD_EIO);
	fail_with(f, 0);
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
	CHECK_EQ(f->engine.most_in_flight, REQUESTS_MAX);
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
	int deaf = connected(f), other;

	forget_submitted(f);
	for (unsigned i = 0; i < count; i++)
		CHECK(say_request(deaf, NBD_CMD_READ, 0, 9, 0, REQUEST_MAX));
	/* It holds all that it will get. */
	WAIT_FOR(submitted(f) >= REQUESTS_MAX - 1 && in_flight(f) == 0);
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

	CHECK_EQ(isw_frontend_nbd_socket(&f->engine, "nowhere/at.sock", &frontend, &error),
		 -ENOENT);
	CHECK(strstr(error.text, "nowhere/at.sock") != NULL);
	CHECK_EQ(isw_frontend_nbd_socket(&f->engine, f->path, &frontend, &error), -EADDRINUSE);
}

static unsigned connections_lost(struct fixture *f)
{
	unsigned lost;

	pthread_mutex_lock(&f->engine.lock);
	lost = f->engine.connections_lost;
	pthread_mutex_unlock(&f->engine.lock);
	return lost;
}

/* The front end for the kernel: sockets in transmission, counted; one that ends is reported. */
static void test_sockets_that_are_given(struct fixture *f)
{
	char block[ISW_PAGE_BYTES] = {0};
	struct isw_error error;
	isw_frontend *frontend;
	int first[2], second[2];

	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, first), 0);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, second), 0);
	bound_waits(first[0]);
	bound_waits(second[0]);
	CHECK_EQ(isw_frontend_nbd_serve(f->frontend, first[1], &error), -EINVAL);
	CHECK_EQ(isw_frontend_nbd(&f->engine, ISW_PAGE_BYTES, &frontend, &error), 0);
	CHECK_EQ(isw_frontend_nbd_serve(frontend, first[1], &error), 0);
	CHECK_EQ(isw_frontend_nbd_serve(frontend, second[1], &error), 0);
	CHECK_EQ(isw_frontend_nbd_serve(frontend, -1, &error), -EBADF);
	close(first[1]); /* it has one of its own */
	close(second[1]);
	CHECK_EQ(isw_frontend_nbd_connections(frontend), 2);
	CHECK_EQ(do_write(first[0], 0, block, sizeof(block)), 0);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	CHECK(say_request(second[0], NBD_CMD_READ, 0, 3, 0, 2 * ISW_PAGE_BYTES));
	CHECK_EQ(hear_reply(second[0], 3, NULL, 0), NBD_EINVAL);
	CHECK_EQ(connections_lost(f), 0);
	/* Reported when it ends, not when the last of its requests has. */
	hold_back(f, true);
	CHECK(say_request(first[0], NBD_CMD_READ, 0, 4, 0, ISW_PAGE_BYTES));
	WAIT_FOR(in_flight(f) == 1);
	close(first[0]);
	WAIT_FOR(connections_lost(f) == 1);
	CHECK_EQ(in_flight(f), 1);
	CHECK_EQ(isw_frontend_nbd_connections(frontend), 1);
	hold_back(f, false);
	CHECK_EQ(do_read(second[0], 0, block, sizeof(block)), 0);
	isw_frontend_destroy(frontend);
	hear_close(second[0]);
	close(second[0]);
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
	test_sockets_that_are_given(&f);
	test_end_waits_for_the_engine(&f);
	tear_down(&f);
	return 0;
}
